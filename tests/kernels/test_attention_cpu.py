from collections.abc import Sequence

import pytest
import torch
from paged_cases import make_case, random_case, random_stream

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.attention_cpu_plan import QUERY_TILE, make_plan
from pagedserve.kernels.kv_cache import KVCache

# (context, tokens): single tokens and chunks, at, before and after the edges of blocks and of 64-token tiles.
AWKWARD = [
    (0, 1),
    (0, 7),
    (126, 1),
    (127, 1),
    (128, 1),
    (255, 1),
    (300, 1),
    (5, 2),
    (120, 70),
    (128, 128),
    (0, 129),
]
HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 32), (7, 1, 80), (6, 2, 128)]


def assert_near_reference(out: torch.Tensor, expected: torch.Tensor) -> None:
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, expected, atol=3e-6, rtol=0)
    else:
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_equals_reference_on_awkward_sizes(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = random_case(AWKWARD, AttentionSpec(heads, kv_heads, head_dim), 16, dtype)
    assert_near_reference(case.run("cpu"), case.run("reference"))


@pytest.mark.parametrize("block_size", [1, 4, 48, 256])
def test_equals_reference_for_other_block_sizes(block_size: int) -> None:
    case = random_case(AWKWARD, AttentionSpec(6, 2, 32), block_size)
    assert_near_reference(case.run("cpu"), case.run("reference"))


@pytest.mark.parametrize("window", [1, 5, 130, 4096])
def test_equals_reference_with_a_sliding_window(window: int) -> None:
    case = random_case(AWKWARD, AttentionSpec(6, 2, 32, window), 16)
    assert_near_reference(case.run("cpu"), case.run("reference"))


@pytest.mark.parametrize("gather_bytes", [1, 100_000, 6 << 20])
def test_equals_reference_for_a_large_skewed_decode_group(
    gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels that sequences leave one after another, cut into gathers of one, several and all tiles."""
    monkeypatch.setattr("pagedserve.kernels.attention_cpu_plan.GATHER_BYTES", gather_bytes)
    case = random_case([(37 * n % 1100, 1) for n in range(40)], AttentionSpec(6, 2, 16), 16)
    (group,) = make_plan(case.batch, case.cache, case.spec).groups
    tiles = sum(group.level_sizes)
    assert len(group.chunks) == {1: tiles, 100_000: -(-tiles // 6), 6 << 20: 1}[gather_bytes]
    assert_near_reference(case.run("cpu"), case.run("reference"))


def test_huge_scores_do_not_overflow() -> None:
    case = random_case([(200, 1), (150, 60)], AttentionSpec(4, 2, 16), 16)
    case.query.mul_(1e4)
    assert_near_reference(case.run("cpu"), case.run("reference"))


def test_scratch_of_an_earlier_step_does_not_leak() -> None:
    """A NaN in one sequence's own tokens stays with it, also in memory that is reused."""
    spec = AttentionSpec(4, 2, 16)
    generator = torch.Generator().manual_seed(3)
    bad, good = (random_stream(150, spec, torch.float32, generator) for _ in range(2))
    bad.keys_values[:] = float("nan")
    case = make_case([(bad, 149, 150), (good, 149, 150)], spec, 16, generator)
    out = case.run("cpu")
    assert torch.isnan(out[0]).all()
    assert_near_reference(out[1:], make_case([(good, 149, 150)], spec, 16, generator).run("reference"))


def computed_in_chunks(
    chunks: Sequence[int], neighbours: int, spec: AttentionSpec, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """One fixed sequence, computed in ``chunks``, in each step among other sequences and on other blocks."""
    stream = random_stream(sum(chunks), spec, dtype, torch.Generator().manual_seed(0))
    generator, done, rows = torch.Generator().manual_seed(seed), 0, []
    for chunk in chunks:
        parts = [(stream, done, done + chunk)]
        for other in range(neighbours):
            length = int(torch.randint(2, 300, (1,), generator=generator))
            parts.append((random_stream(length, spec, dtype, generator), length - 1 - other % 2, length))
        rows.append(make_case(parts, spec, 16, generator).run("cpu")[:chunk])
        done += chunk
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(9, 3, 64, None), (8, 1, 32, None), (4, 2, 8, None), (7, 1, 80, 90)],
)
def test_results_do_not_depend_on_chunks_or_neighbours(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """B1 at the level of one layer: the additions are the same, so only the BLAS could differ, and by little."""
    spec = AttentionSpec(heads, kv_heads, head_dim, window)
    whole = computed_in_chunks([275], 0, spec, dtype, 1)
    exact = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    for seed, chunks in enumerate(([QUERY_TILE] * 4 + [19], [7] * 39 + [2], [128, 1, 1, 1, 144], [274, 1])):
        for neighbours in (0, 3):
            again = computed_in_chunks(chunks, neighbours, spec, dtype, seed)
            if exact:
                assert torch.equal(again, whole)
            else:
                assert_near_reference(again, whole)


def test_indices_are_64_bit() -> None:
    """B12: rows of a cache with more than 2^31 numbers, worked out without allocating it."""
    cache = KVCache(1, 1 << 27, 16, 8, 128, torch.bfloat16, device="meta")
    spec = AttentionSpec(32, 8, 128)
    block = (1 << 27) - 1
    batch = PagedBatch(
        slot_mapping=torch.tensor([block * 16 + 3]),
        block_tables=torch.tensor([[block]], dtype=torch.int32),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
        max_query_len=1,
        max_context_len=3,
    )
    (group,) = make_plan(batch, cache, spec).groups
    rows = group.chunks[0].gather.rows.view(2, 8, 4)  # keys and values, heads, blocks of the tile
    assert rows[0, 0, 0] == block * 16
    assert rows[1, 7, 0] == block * 16 + 15
    assert rows[0, 0, 1] == cache.zero_block * 16


def test_one_gather_serves_all_query_tiles_of_a_chunk() -> None:
    case = random_case([(300, 3 * QUERY_TILE + 5)], AttentionSpec(4, 2, 16), 16)
    plan = make_plan(case.batch, case.cache, case.spec)
    assert not plan.groups
    (chunk,) = plan.prefills
    assert [tile.stop - tile.start for tile in chunk.tiles] == [QUERY_TILE] * 3 + [5]
    assert chunk.gather.num_tiles == chunk.tiles[-1].last == 8
    assert chunk.tiles[0].masked_from == 4  # tiles wholly before the first query are not masked
