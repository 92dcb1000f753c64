"""Paged attention at the shapes of Llama-3.1-8B and Qwen3-0.6B: decodes, prompts, chunks behind a prefix, a mixture.

The twin is the naive backend, for some tokens of every case. The peer is torch's scaled dot product, on keys and
values that lie together, of the same sizes; it reads no block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from gpu_cases import KernelCase, run_cases
from gpu_part import Part
from gpu_published import decode_us, prefill_us
from gpu_timing import Call, nan_filled, relative_error
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.attention_reference import ReferenceAttention
from pagedserve.kernels.attention_triton import TritonAttention, attend_part
from pagedserve.kernels.kv_cache import KVCache

BLOCK_SIZE = 16
LLAMA, QWEN, TINY = AttentionSpec(32, 8, 128), AttentionSpec(16, 8, 128), AttentionSpec(4, 2, 16)
MAX_CHECKED = 48
"""Tokens of a case that the twin computes."""
SCALES = (0.02, 0.02)
"""Of keys and values, in a cache of bytes: normal numbers become a hundred and more of e4m3's steps."""
DECODES = (
    *((1, past) for past in (2047, 16383)),
    *((8, past) for past in (2047, 8191)),
    *((32, past) for past in (511, 2047)),
    *((64, past) for past in (127, 511, 1023, 2047, 4095, 8191)),
    *((128, past) for past in (2047,)),
    *((256, past) for past in (511, 1023)),
)
PROMPTS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences with (context, tokens) each, chunks first; ``variant``: bf16 cache, fp8 cache or invariant."""

    model: str
    spec: AttentionSpec
    sequences: tuple[tuple[int, int], ...]
    text: str
    variant: str = ""
    published_us: float | None = None


def shapes(is_tiny: bool) -> Iterator[Shape]:
    """What matters most comes first."""
    if is_tiny:
        yield Shape("tiny", TINY, ((37, 1),) * 2, "2 decodes at 37", published_us=1.0)
        yield Shape("tiny", TINY, ((37, 1), (3, 1)), "2 decodes, fp8 cache", "fp8")
        yield Shape("tiny", TINY, ((0, 20),), "a prompt of 20, invariant", "invariant")
        yield Shape("tiny", TINY, ((0, 20),), "a prompt of 20")
        yield Shape("tiny", TINY, ((16, 5),), "a chunk of 5 behind 16")
        yield Shape("tiny", TINY, ((16, 5), (30, 1)), "a chunk of 5 behind 16 and a decode")
        return
    named = ("llama-3.1-8b", LLAMA)
    even = ((2047, 1),) * 64
    for batch, past in sorted(DECODES, key=lambda pair: pair != (64, 2047)):
        yield Shape(*named, ((past, 1),) * batch, f"{batch} decodes at {past}", "", decode_us(batch, past))
    for count in sorted(PROMPTS, key=lambda count: count != 8192):
        yield Shape(*named, ((0, count),), f"a prompt of {count}", "", prefill_us(count))
    yield Shape("qwen3-0.6b", QWEN, even, "64 decodes at 2047")
    yield Shape("qwen3-0.6b", QWEN, ((0, 8192),), "a prompt of 8192")
    yield Shape(*named, ((8192, 512),), "a chunk of 512 behind 8192")
    yield Shape(*named, ((2048, 2048),), "a chunk of 2048 behind 2048")
    yield Shape(*named, ((2048, 512), *even), "a chunk of 512 behind 2048 and 64 decodes at 2047")
    yield Shape(*named, tuple((64 * row + 15, 1) for row in range(64)), "64 decodes at 15, 79, ... 4047")
    yield Shape(*named, even, "64 decodes at 2047, fp8 cache", "fp8")
    yield Shape(*named, even, "64 decodes at 2047, invariant", "invariant")
    yield Shape(*named, ((0, 8192),), "a prompt of 8192, invariant", "invariant")


def run(part: Part) -> None:
    """All shapes."""
    cases = [_named(shape, partial(make_case, shape, part.device)) for shape in shapes(part.is_tiny)]
    run_cases(part, cases, "kernels")


def _named(shape: Shape, make: Callable[[], KernelCase]) -> Callable[[], KernelCase]:
    make.__name__ = f"attention, {shape.model}, {shape.text}"
    return make


def make_case(shape: Shape, device: str) -> KernelCase:
    """Random queries and a random cache, blocks in random order."""
    spec, is_bytes = shape.spec, shape.variant == "fp8"
    counts = [-(-(context + tokens) // BLOCK_SIZE) for context, tokens in shape.sequences]
    cache = KVCache(1, sum(counts), BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, torch.bfloat16, device)
    cache.data.normal_()
    stored = cache.layer(0)
    if is_bytes:
        stored = (stored.float() / SCALES[0]).clamp(-448, 448).to(torch.float8_e4m3fn)
        cache.data[0] = (stored.float() * SCALES[0]).to(torch.bfloat16)  # what the twin sees
        stored = stored.view(torch.uint8)
    batch = _batch(shape.sequences, counts, device)
    query = torch.randn(len(batch.slot_mapping), spec.num_heads, spec.head_dim, device=device)
    query = query.to(torch.bfloat16)
    attention = TritonAttention(spec, device, invariant=shape.variant == "invariant")
    asked = cache
    if is_bytes:
        asked = KVCache(1, 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, torch.uint8, device)
    plan = attention.prepare(batch, asked)

    def attend() -> torch.Tensor:
        if not is_bytes:
            return attention.attend(query, stored, plan)
        out = torch.empty_like(query)
        for launch in plan.launches:
            attend_part(query, stored, out, batch, launch, spec, SCALES)
        return out

    seen = sum(tokens * context + tokens * (tokens + 1) // 2 for context, tokens in shape.sequences)
    length = sum(context + tokens for context, tokens in shape.sequences)
    return KernelCase(
        "attention",
        shape.model,
        shape.text,
        lambda: _error(attend, query, batch, cache, spec),
        attend,
        2 * length * spec.num_kv_heads * spec.head_dim * stored.element_size() + 4 * query.numel(),
        4 * seen * spec.num_heads * spec.head_dim,
        peers={} if is_bytes else _peers(shape, device),
        published_us=shape.published_us,
    )


def _batch(sequences: Sequence[tuple[int, int]], counts: Sequence[int], device: str) -> PagedBatch:
    order = torch.randperm(sum(counts), dtype=torch.int32, device=device)
    tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=device)
    begin = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[begin : begin + count]
        begin += count
    tokens = torch.tensor([0, *(tokens for _, tokens in sequences)])
    decodes = sum(tokens == 1 for _, tokens in sequences)
    return PagedBatch(
        slot_mapping=torch.zeros(int(tokens.sum()), dtype=torch.int64, device=device),
        block_tables=tables,
        query_start=tokens.cumsum(0).to(torch.int32).to(device),
        context_lens=torch.tensor([c for c, _ in sequences], dtype=torch.int32, device=device),
        max_query_len=int(tokens.max()),
        max_context_len=max(context for context, _ in sequences),
        num_decodes=decodes,
    )


def _error(
    attend: Callable[[], torch.Tensor],
    query: torch.Tensor,
    batch: PagedBatch,
    cache: KVCache,
    spec: AttentionSpec,
) -> float:
    """Of some tokens, evenly spread, the last included, each computed by the twin as a decode of its own."""
    with nan_filled():
        found = attend()
    if not bool(torch.isfinite(found.float()).all()):
        return float("inf")
    total = len(query)
    rows = torch.linspace(0, total - 1, min(MAX_CHECKED, total)).round().long().to(query.device)
    owner = torch.searchsorted(batch.query_start[1:].long(), rows, right=True)
    position = batch.context_lens[owner] + (rows - batch.query_start[owner]).to(torch.int32)
    alone = replace(
        batch,
        slot_mapping=torch.zeros_like(rows),
        block_tables=batch.block_tables[owner],
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device=query.device),
        context_lens=position,
        max_query_len=1,
        max_context_len=int(position.max()),
        num_decodes=len(rows),
    )
    twin = ReferenceAttention(spec)
    expected = twin.attend(query[rows], cache.layer(0), twin.prepare(alone, cache))
    return relative_error(found[rows], expected)


def _peers(shape: Shape, device: str) -> Mapping[str, Call]:
    """Torch's, where all sequences are alike: it has no lengths of their own."""
    spec, (context, tokens) = shape.spec, shape.sequences[0]
    if len(set(shape.sequences)) > 1 or shape.variant:
        return {}
    batch, length = len(shape.sequences), context + tokens

    def random(heads: int, count: int) -> torch.Tensor:
        return torch.randn(batch, heads, count, spec.head_dim, device=device, dtype=torch.bfloat16)

    query, keys = random(spec.num_heads, tokens), random(spec.num_kv_heads, length)
    values = random(spec.num_kv_heads, length)
    if tokens == 1:
        return {"sdpa": partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True)}
    if context == 0:
        causal = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return {"sdpa": partial(causal, query, keys, values)}
    mask = causal_lower_right(tokens, length)
    return {
        "sdpa": lambda: scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    }
