"""Kernels and a whole engine on a CUDA device, against their twins on the CPU; `benchmarks/gpu_check.py` runs these.

Without a GPU they run in Triton's interpreter (``pytest -m gpu``), so that they stay true. Only torch, triton,
tokenizers, numpy, pyarrow and pytest are needed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_device import DEVICE, ROUNDING, nan_filled, nothing_waits, random_tensor
from paged_cases import Case, make_case, random_case, random_stream

from pagedserve.engine.engine import Engine
from pagedserve.engine.graphs import DecodeGraphs, cuda_capture
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import random_weights
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.sampling import draws
from pagedserve.engine.sampling import philox as philox_twin
from pagedserve.engine.sampling.kernel_choice import choose_by_kernels
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import choose_in_torch
from pagedserve.engine.tiny import tiny_model
from pagedserve.kernels import greedy, philox, rms_norm, rope_kv, silu_multiply
from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.attention_triton import INVARIANT_SPLIT, TritonAttention, attend_part
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits, policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
IS_CUDA = DEVICE.type == "cuda"
AWKWARD = [(0, 7), (5, 2), (120, 70), (0, 129), (0, 1), (126, 1), (127, 1), (128, 1), (300, 1)]
BF16 = torch.bfloat16
SPECS = [
    AttentionSpec(9, 3, 64),
    AttentionSpec(16, 8, 128),
    AttentionSpec(6, 2, 96, sliding_window=70),
    AttentionSpec(4, 2, 256, soft_cap=20.0),
]
DTYPES = [torch.float32, BF16, torch.float16, BF16]


def moved(case: Case) -> Case:
    """The case on the device."""
    cache = KVCache(
        1,
        case.cache.num_blocks,
        case.cache.block_size,
        case.cache.num_kv_heads,
        case.cache.head_dim,
        case.cache.data.dtype,
        DEVICE,
    )
    cache.data.copy_(case.cache.data)
    tensors = ("slot_mapping", "block_tables", "query_start", "context_lens")
    batch = replace(case.batch, **{name: getattr(case.batch, name).to(DEVICE) for name in tensors})
    return Case(cache, batch, case.query.to(DEVICE), case.spec)


def attended(case: Case, **options: Any) -> torch.Tensor:
    """By the kernel on the device."""
    there = moved(case)
    attention = TritonAttention(case.spec, DEVICE, **options)
    plan = attention.prepare(there.batch, there.cache)
    with nan_filled():
        return attention.attend(there.query, there.cache.layer(0), plan).cpu()


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("spec", "dtype"), list(zip(SPECS, DTYPES, strict=True)), ids=str)
def test_attention_equals_the_reference(spec: AttentionSpec, dtype: torch.dtype, invariant: bool) -> None:
    """Unwritten slots hold NaN."""
    case = random_case(AWKWARD if IS_CUDA else AWKWARD[1::3], spec, 16, dtype)
    assert_near(attended(case, invariant=invariant), case.run("reference"), dtype)


@pytest.mark.parametrize("block_size", [32, 48, 256] if IS_CUDA else [48])
def test_attention_on_other_blocks(block_size: int) -> None:
    case = random_case(AWKWARD[::3], AttentionSpec(16, 8, 128), block_size, BF16)
    assert_near(attended(case), case.run("reference"), BF16)


def test_attention_with_splits() -> None:
    case = random_case([(1100, 1), (3, 1), (64, 1), (640, 1)], AttentionSpec(8, 2, 64), 16, BF16)
    for num_sms in (1, 9, 200) if IS_CUDA else (9,):
        assert_near(attended(case, num_sms=num_sms), case.run("reference"), BF16)


def test_attention_in_the_invariant_mode_does_not_know_chunks_or_neighbours() -> None:
    spec, length = AttentionSpec(8, 2, 64) if IS_CUDA else AttentionSpec(2, 1, 16), INVARIANT_SPLIT + 9
    generator = torch.Generator().manual_seed(0)
    stream, other = (random_stream(length, spec, torch.float32, generator) for _ in range(2))
    whole = attended(make_case([(stream, 0, length)], spec, 16, generator), invariant=True)
    cut, rows = length - 3, []
    rows.append(attended(make_case([(stream, 0, cut)], spec, 16, generator), invariant=True))
    for start in range(cut, length):
        parts = [(stream, start, start + 1), (other, 99, 100)]
        rows.append(attended(make_case(parts, spec, 16, generator), invariant=True)[:1])
    assert torch.equal(torch.cat(rows), whole)


def test_attention_on_a_cache_of_bytes_beyond_31_bits() -> None:
    """The last block of more than 2^31 bytes (CASES B12), with scales."""
    spec, block_size, scales = AttentionSpec(4, 1, 64), 16, (0.5, 3.0)
    num_blocks, length = (1 << 31) // (2 * block_size * spec.head_dim) + 40, 12
    layer = torch.empty((num_blocks, 2, 1, block_size, 64), dtype=torch.uint8, device=DEVICE)
    content = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    layer[-1, :, 0, :length] = content.view(torch.uint8).to(DEVICE)
    query = random_tensor(1, 4, 64)
    ints = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(
        slot_mapping=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        block_tables=ints([[num_blocks - 1]]),
        query_start=ints([0, 1]),
        context_lens=ints([length - 1]),
        max_query_len=1,
        max_context_len=length - 1,
        num_decodes=1,
    )
    asked = KVCache(1, 1, block_size, 1, 64, torch.uint8, DEVICE)
    (launch,) = TritonAttention(spec, DEVICE).prepare(batch, asked).launches
    out = torch.full((1, 4, 64), float("nan"), device=DEVICE)
    attend_part(query, layer, out, batch, launch, spec, scales)
    keys, values = (part.float() * scale for part, scale in zip(content, scales, strict=True))
    weights = torch.softmax(query[0].cpu() @ keys.T * spec.scale, dim=-1)
    assert_near(out[0], weights @ values, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norms_and_gates(dtype: torch.dtype) -> None:
    rows, delta = (random_tensor(37, 4096 if IS_CUDA else 100, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random_tensor(rows.shape[1], dtype=dtype, seed=3)
    near = partial(torch.testing.assert_close, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    with nan_filled():
        found = rms_norm.rms_norm(rows, weight, 1e-5)
        gated = silu_multiply.silu_multiply(rows)
    near(found, rms_norm.rms_norm_twin(rows, weight, 1e-5))
    near(gated, silu_multiply.silu_multiply_twin(rows))
    ours, theirs = rows.clone(), rows.clone()
    found = rms_norm.add_rms_norm(ours, delta, weight, 1e-5)
    near(found, rms_norm.add_rms_norm_twin(theirs, delta, weight, 1e-5))
    near(ours, theirs)


@pytest.mark.parametrize("kind", ["plain", "head norms", "bytes"])
def test_rotation_and_write(kind: str) -> None:
    """Slots of -1 write nothing; what was there stays."""
    heads, kv_heads, head_dim, tokens = 16, 8, 128 if IS_CUDA else 32, 21
    dtype = torch.uint8 if kind == "bytes" else BF16
    projected = random_tensor(tokens, heads + 2 * kv_heads, head_dim, dtype=BF16)
    angles = random_tensor(64, head_dim // 2, seed=1)
    positions = torch.arange(tokens, device=DEVICE) * 3
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
    slots[::5] = -1
    norms = (random_tensor(head_dim, dtype=BF16), random_tensor(head_dim, dtype=BF16, seed=2))
    scales = (0.02, 0.04) if kind == "bytes" else (1.0, 1.0)
    layers = [KVCache(1, 2, 16, kv_heads, head_dim, dtype, DEVICE).layer(0) for _ in range(2)]
    more = (norms if kind == "head norms" else None, 1e-6, scales)
    given = (projected, positions, (angles.cos(), angles.sin()), slots)
    with nan_filled():
        found = rope_kv.rotate_and_write(*given, layers[0], *more)
    expected = rope_kv.rotate_and_write_twin(*given, layers[1], *more)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if kind == "bytes":
        layers = [layer.view(torch.float8_e4m3fn).float() for layer in layers]
    torch.testing.assert_close(layers[0], layers[1], rtol=0.13, atol=2e-2)


def test_sampling() -> None:
    """From equal weights the tokens of the torch code; greedy and noise exactly."""
    vocab_size = 50_257 if IS_CUDA else 5_000
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=2, temperature=0.7, top_p=0.95),
        SamplingParams(seed=3, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(seed=4, min_p=0.2),
    ]
    table = SamplingRows(vocab_size, DEVICE)
    for row, one in enumerate(params):
        table.add(row, one, seed=one.seed or 0, prompt_ids=[0])
    batch = table.select(tuple(range(len(params))), [5] * len(params))
    logits = (random_tensor(len(params), vocab_size) * 3).bfloat16().float()
    left = logits.clone()
    with nan_filled():
        tokens, peaks = choose_by_kernels(left, batch)
        largest, highest = greedy.greedy_tokens(logits)
    with mock.patch.object(draws, "fixed_point_weights", lambda weights, *_: weights.to(torch.int64)):
        expected, _ = choose_in_torch(left.clone(), batch)
    assert tokens.tolist() == expected.tolist()
    twin, top = greedy.greedy_tokens_twin(logits)
    assert torch.equal(largest, twin)
    assert torch.equal(highest, top)
    assert torch.equal(peaks, top)
    draw = random.Random(0)
    rows = [[draw.randrange(-(1 << 63), 1 << 63) for _ in range(99)], list(range(99)), [3] * 99]
    words = philox.noise_words(*(torch.tensor(each, device=DEVICE) for each in rows))
    assert torch.equal(words.cpu(), philox_twin.noise_words(*(torch.tensor(each) for each in rows)))


def small_model(kind: str, attention: str, device: torch.device) -> Model:
    """Two layers in float32; equal weights for equal kinds."""
    config = ModelConfig.from_hf(
        {
            "architectures": [f"{kind}ForCausalLM"],
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
        }
    )
    return Model(config, random_weights(config, 7), dtype=torch.float32, device=device, attention=attention)


def graphs_of(model: Model, kv: KVCache, most: int, max_model_len: int) -> DecodeGraphs:
    """Recorded; without CUDA a recording is the function itself, run again on the same buffers."""
    sizes = tuple(size for size in (1, 2, 4, 8) if size <= most)
    graphs = DecodeGraphs(model, kv, sizes, max_model_len, cuda_capture() if IS_CUDA else lambda run: run)
    assert len(list(graphs.record())) == len(sizes)
    return graphs


def test_graphs_equal_eager_steps_and_padding_is_inert() -> None:
    model = small_model("Qwen3", "triton", DEVICE)
    kv = model.make_cache(20, 16)
    graphs = graphs_of(model, kv, 8, 128)
    kv.data[:, :20].normal_()
    for count in (8, 3, 1):
        chunks = [SequenceChunk([row + 5], 9 + row, [row, row + 8]) for row in range(count)]
        batch = make_batch(chunks, 16, DEVICE)
        before = kv.data.clone()
        found = graphs.logits(batch)
        assert found is not None
        found, written = found.clone(), kv.data.clone()
        kv.data.copy_(before)
        torch.testing.assert_close(found, model.logits(model.forward(batch, kv)), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kv.data, written, atol=1e-6, rtol=1e-5)


def outputs(model: Model, vocabulary: Vocabulary, depth: int, has_graphs: bool) -> list[tuple[int, ...]]:
    """Greedy tokens of requests of which not all fit at once."""
    limits = Limits(max_num_batched_tokens=24, max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=9)
    engine = Engine(model, vocabulary, policy("vllm_v1"), limits, overlap_depth=depth, seed=0)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    if has_graphs:
        runner.graphs = graphs_of(model, runner.kv, 4, 64)
    draw = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (5, 17, 26, 1, 13)]
    states = [engine.submit(prompt, params)[0] for prompt in prompts]
    with nothing_waits():
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
    engine.close()
    return [state.completion().token_ids for state in states]


@pytest.mark.parametrize(("depth", "has_graphs"), [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"] if IS_CUDA else ["Qwen3"])
def test_an_engine_says_what_the_reference_says(kind: str, depth: int, has_graphs: bool) -> None:
    _, vocabulary = tiny_model()
    expected = outputs(small_model(kind, "reference", torch.device("cpu")), vocabulary, 0, False)
    assert len(set(expected)) > 1
    assert outputs(small_model(kind, "triton", DEVICE), vocabulary, depth, has_graphs) == expected
