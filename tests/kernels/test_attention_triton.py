"""Paged attention in Triton, under its interpreter: equal to the reference, and in the invariant mode to itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, make_case, random_case, random_stream

from pagedserve.kernels.attention import AttentionSpec, PagedBatch, make_attention
from pagedserve.kernels.attention_triton import (
    INVARIANT_SPLIT,
    MAX_SPLITS,
    Launch,
    TritonAttention,
    attend_part,
    choose_shape,
)
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.kernels.launching import is_interpreted, next_power_of_two

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
AWKWARD = [(0, 7), (5, 2), (120, 70), (0, 129), (0, 1), (126, 1), (127, 1), (128, 1), (300, 1)]
# Groups that are no power of two, one head for all, heads of sizes that need padding.
HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 128), (7, 1, 80), (6, 2, 96), (4, 2, 256)]


def run(case: Case, **options: object) -> torch.Tensor:
    attention = TritonAttention(case.spec, "cpu", **options)  # pyright: ignore[reportArgumentType]
    plan = attention.prepare(case.batch, case.cache)
    return attention.attend(case.query, case.cache.layer(0), plan)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 5e-6 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_equals_reference_on_awkward_sizes(heads: int, kv_heads: int, head_dim: int, invariant: bool) -> None:
    """Unwritten slots hold NaN: none may reach a result."""
    case = random_case(AWKWARD, AttentionSpec(heads, kv_heads, head_dim), 16)
    assert_near(run(case, invariant=invariant), case.run("reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_reference_in_half_precision(dtype: torch.dtype) -> None:
    case = random_case(AWKWARD, AttentionSpec(9, 3, 64), 16, dtype)
    assert_near(run(case), case.run("reference"))


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
def test_equals_reference_for_other_block_sizes(block_size: int) -> None:
    """Below a tile's size, at it, above it, and not a power of two."""
    case = random_case(AWKWARD, AttentionSpec(6, 2, 32), block_size)
    assert_near(run(case), case.run("reference"))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [1, 5, 130, 4096])
def test_equals_reference_with_a_sliding_window(window: int, invariant: bool) -> None:
    case = random_case(AWKWARD, AttentionSpec(6, 2, 32, window), 16)
    assert_near(run(case, invariant=invariant), case.run("reference"))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_equals_reference_with_a_soft_cap(cap: float) -> None:
    case = random_case(AWKWARD, AttentionSpec(6, 2, 32, soft_cap=cap), 16)
    uncapped = replace(case, spec=AttentionSpec(6, 2, 32))
    assert_near(run(case), case.run("reference"))
    assert not torch.allclose(run(case), run(uncapped), atol=1e-3)


@pytest.mark.parametrize("num_sms", [1, 3, 200])
def test_equals_reference_whatever_the_splits(num_sms: int) -> None:
    """One split, several, and more than some sequences have tiles: those are empty."""
    case = random_case([(1100, 1), (3, 1), (64, 1), (640, 1)], AttentionSpec(6, 2, 32), 16)
    plan = TritonAttention(case.spec, "cpu", num_sms=num_sms).prepare(case.batch, case.cache)
    assert [launch.shape.num_splits for launch in plan.launches] == [{1: 1, 3: 1, 200: 8}[num_sms]]
    assert_near(run(case, num_sms=num_sms), case.run("reference"))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=4),
    st.lists(st.integers(0, 200), max_size=5),
    st.sampled_from(HEADS[:4]),
    st.sampled_from([16, 48]),
    st.booleans(),
)
def test_equals_reference_on_any_step(
    chunks: list[tuple[int, int]],
    decodes: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    invariant: bool,
) -> None:
    case = random_case([*chunks, *((context, 1) for context in decodes)], AttentionSpec(*heads), block_size)
    assert_near(run(case, invariant=invariant), case.run("reference"))


def test_huge_scores_do_not_overflow() -> None:
    case = random_case([(150, 60), (200, 1)], AttentionSpec(4, 2, 16), 16)
    case.query.mul_(1e4)
    assert_near(run(case), case.run("reference"))


def test_a_nan_stays_with_its_sequence() -> None:
    spec = AttentionSpec(4, 2, 16)
    generator = torch.Generator().manual_seed(3)
    bad, good = (random_stream(150, spec, torch.float32, generator) for _ in range(2))
    bad.keys_values[:] = float("nan")
    out = run(make_case([(bad, 149, 150), (good, 149, 150)], spec, 16, generator))
    assert torch.isnan(out[0]).all()
    assert_near(out[1:], make_case([(good, 149, 150)], spec, 16, generator).run("reference"))


def computed_in_chunks(
    chunks: Sequence[int], neighbours: int, spec: AttentionSpec, seed: int, invariant: bool
) -> torch.Tensor:
    """One fixed sequence, computed in ``chunks``, in each step among other sequences and on other blocks."""
    stream = random_stream(sum(chunks), spec, torch.float32, torch.Generator().manual_seed(0))
    generator, done, rows = torch.Generator().manual_seed(seed), 0, []
    for chunk in chunks:
        parts = [(stream, done, done + chunk)]
        for other in range(neighbours):
            length = int(torch.randint(2, 1200, (1,), generator=generator))
            parts.append(
                (random_stream(length, spec, torch.float32, generator), length - 1 - other % 2, length)
            )
        rows.append(run(make_case(parts, spec, 16, generator), invariant=invariant)[:chunk])
        done += chunk
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 90])
def test_b1_the_invariant_mode_does_not_know_neighbours_or_chunks(window: int | None) -> None:
    """Bit for bit, over the edge of a split, as a whole, in chunks and single tokens; the other mode is not so."""
    spec = AttentionSpec(6, 2, 32, window)
    length = INVARIANT_SPLIT + 70
    whole = computed_in_chunks([length], 0, spec, 1, True)
    ways = (
        [200, 200, length - 400],
        [INVARIANT_SPLIT - 1, 1, 1, 1, length - INVARIANT_SPLIT - 2],
        [length - 2, 2],
    )
    for seed, chunks in enumerate(ways):
        assert torch.equal(computed_in_chunks(chunks, seed, spec, seed, True), whole)
    if window is None:
        assert not torch.equal(computed_in_chunks(ways[1], 0, spec, 0, False), whole)


def test_b12_a_cache_beyond_31_bits() -> None:
    """CASES B12: the last block of a cache of more than 2^31 bytes, of which hardly any is touched."""
    spec, block_size = AttentionSpec(2, 1, 64), 16
    num_blocks = (1 << 31) // (2 * block_size * spec.head_dim) + 40
    layer = torch.empty((num_blocks, 2, 1, block_size, spec.head_dim), dtype=torch.uint8)
    assert layer.numel() > 1 << 31
    block, length = num_blocks - 1, 5
    generator = torch.Generator().manual_seed(1)
    content = torch.randn(2, length, spec.head_dim, generator=generator).to(torch.float8_e4m3fn)
    layer[block, :, 0, :length] = content.view(torch.uint8)
    query = torch.randn(1, 2, spec.head_dim, generator=generator)
    batch = PagedBatch(
        slot_mapping=torch.tensor([block * block_size + length - 1]),
        block_tables=torch.tensor([[block]], dtype=torch.int32),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([length - 1], dtype=torch.int32),
        max_query_len=1,
        max_context_len=length - 1,
        num_decodes=1,
    )
    shape = choose_shape(
        spec, element_bytes=1, max_query_len=1, max_len=length, num_programs=1, num_sms=1, invariant=False
    )
    out = torch.full((1, 2, spec.head_dim), float("nan"))
    attend_part(query, layer, out, batch, Launch(0, 1, 0, 1, shape, None, None), spec)
    keys, values = content.float()
    weights = torch.softmax(query[0] @ keys.T * spec.scale, dim=-1)
    assert_near(out[0], weights @ values)


def test_an_eight_bit_cache_has_scales() -> None:
    """Bytes times a scale each for keys and values, in chunks and in decodes with splits."""
    spec = AttentionSpec(6, 2, 64)
    case = random_case([(30, 20), (300, 1), (17, 1)], spec, 16)
    scales = (0.5, 3.0)
    data = torch.nan_to_num(case.cache.layer(0))
    bytes_of = torch.stack([data[:, 0] / scales[0], data[:, 1] / scales[1]], dim=1).to(torch.float8_e4m3fn)
    back = bytes_of.float()
    twin = KVCache(1, case.cache.num_blocks, 16, 2, 64, torch.float32)
    twin.data[0] = torch.stack([back[:, 0] * scales[0], back[:, 1] * scales[1]], dim=1)
    expected = replace(case, cache=twin).run("reference")
    layer, out = bytes_of.view(torch.uint8), torch.full_like(case.query, float("nan"))
    for launch in TritonAttention(spec, "cpu", num_sms=100).prepare(case.batch, case.cache).launches:
        attend_part(case.query, layer, out, case.batch, launch, spec, scales)
    assert_near(out, expected)


def test_shapes_are_chosen_as_documented() -> None:
    """Splits only where programs are few, never more than tiles, none for chunks; rows are whole groups."""
    llama, window = AttentionSpec(32, 8, 128), AttentionSpec(28, 4, 128)
    common = {"element_bytes": 2, "num_sms": 132, "invariant": False}
    alone = choose_shape(llama, max_query_len=1, max_len=8192, num_programs=8, **common)
    assert (alone.num_splits, alone.block_m, alone.block_q) == (MAX_SPLITS, 16, 4)
    assert choose_shape(llama, max_query_len=1, max_len=8192, num_programs=512, **common).num_splits == 1
    assert choose_shape(llama, max_query_len=1, max_len=200, num_programs=8, **common).num_splits == 1
    assert choose_shape(llama, max_query_len=512, max_len=8192, num_programs=8, **common).num_splits == 1
    for spec in (llama, window, AttentionSpec(40, 1, 128)):
        for query_len in (1, 512):
            shape = choose_shape(spec, max_query_len=query_len, max_len=999, num_programs=1, **common)
            assert shape.block_q * spec.group <= shape.block_m == next_power_of_two(shape.block_m)
            assert shape.block_q >= 1
    fixed = {**common, "invariant": True}
    short = choose_shape(llama, max_query_len=1, max_len=2000, num_programs=8, **fixed)
    long = choose_shape(llama, max_query_len=512, max_len=9000, num_programs=800, **fixed)
    assert (short.num_splits, short.split, long.num_splits, long.split) == (4, 512, 1, 512)
    assert replace(short, num_splits=1) == long, "what a row's sums are made of does not depend on the batch"


def test_where_it_cannot_run_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_interpreted()
    monkeypatch.setattr("pagedserve.kernels.launching.is_interpreted", lambda: False)
    with pytest.raises(
        ValueError, match=r"attention 'triton' cannot run on device 'cpu'.*TRITON_INTERPRET=1"
    ):
        make_attention("triton", AttentionSpec(4, 2, 16))
    with pytest.raises(ValueError, match="backend 'cpu' has no soft cap"):
        make_attention("cpu", AttentionSpec(4, 2, 16, soft_cap=1.0))


@pytest.mark.timeout(900)
def test_every_kernel_builds_for_every_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, for the shapes of three models: no spills but those that are listed with a reason."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-W", "ignore", "-m", "pagedserve.kernels.build_report"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    attention = [line for line in done.stdout.splitlines() if line.startswith("attention decode ")]
    assert len(attention) == 9
    assert all(int(line.split()[-1]) > 0 for line in attention), "a decode uses the tensor cores"
