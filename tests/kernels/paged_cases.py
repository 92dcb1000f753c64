"""Random paged batches for the attention tests: scattered blocks, and NaN in every slot that no token wrote."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedserve.kernels.attention import AttentionSpec, PagedBatch, make_attention
from pagedserve.kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Stream:
    """Keys, values and queries of a whole sequence: [n, 2 * KVH, D] and [n, H, D]."""

    keys_values: torch.Tensor
    query: torch.Tensor


@dataclass(frozen=True, slots=True)
class Case:
    cache: KVCache
    batch: PagedBatch
    query: torch.Tensor
    spec: AttentionSpec

    def run(self, backend: str) -> torch.Tensor:
        attention = make_attention(backend, self.spec)
        return attention.attend(self.query, self.cache.layer(0), attention.prepare(self.batch, self.cache))


def random_stream(length: int, spec: AttentionSpec, dtype: torch.dtype, generator: torch.Generator) -> Stream:
    keys_values = torch.randn(length, 2 * spec.num_kv_heads, spec.head_dim, generator=generator)
    query = torch.randn(length, spec.num_heads, spec.head_dim, generator=generator)
    return Stream(keys_values.to(dtype), query.to(dtype))


def make_case(
    parts: Sequence[tuple[Stream, int, int]], spec: AttentionSpec, block_size: int, generator: torch.Generator
) -> Case:
    """Lay out one step: of each stream, tokens ``start`` to ``stop`` are computed and those before are cached."""
    dtype = parts[0][0].query.dtype
    counts = [-(-stop // block_size) for _, _, stop in parts]
    cache = KVCache(1, sum(counts) + 3, block_size, spec.num_kv_heads, spec.head_dim, dtype)
    cache.data[:, : cache.num_blocks] = float("nan")
    order = torch.randperm(cache.num_blocks, generator=generator)
    tables = torch.full((len(parts), max(counts) + 1), cache.num_blocks - 1, dtype=torch.int32)
    slots, begin = [], 0
    for row, ((stream, start, stop), count) in enumerate(zip(parts, counts, strict=True)):
        blocks = order[begin : begin + count]
        begin += count
        tables[row, :count] = blocks.to(torch.int32)
        position = torch.arange(stop)
        slot = blocks[position // block_size] * block_size + position % block_size
        cache.write(0, stream.keys_values[:stop], cache.rows(slot))
        slots.append(slot[start:])
    sizes = torch.tensor([0] + [stop - start for _, start, stop in parts], dtype=torch.int32)
    batch = PagedBatch(
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        query_start=sizes.cumsum(0).to(torch.int32),
        context_lens=torch.tensor([start for _, start, _ in parts], dtype=torch.int32),
        max_query_len=int(sizes.max()),
        max_context_len=max(start for _, start, _ in parts),
        num_decodes=_trailing_ones([stop - start for _, start, stop in parts]),
    )
    query = torch.cat([stream.query[start:stop] for stream, start, stop in parts])
    return Case(cache, batch, query, spec)


def _trailing_ones(counts: Sequence[int]) -> int:
    return next((i for i, count in enumerate(reversed(counts)) if count != 1), len(counts))


def random_case(
    sizes: Sequence[tuple[int, int]],
    spec: AttentionSpec,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """A step of sequences with (context, tokens) each."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        (random_stream(context + count, spec, dtype, generator), context, context + count)
        for context, count in sizes
    ]
    return make_case(parts, spec, block_size, generator)


def dense_attention(stream: Stream, spec: AttentionSpec) -> torch.Tensor:
    """Textbook causal attention in float64 over a whole sequence, [n, H, D]."""
    keys, values = stream.keys_values.double().view(-1, 2, spec.num_kv_heads, spec.head_dim).unbind(1)
    keys = keys.repeat_interleave(spec.group, dim=1)
    values = values.repeat_interleave(spec.group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", stream.query.double(), keys) / spec.head_dim**0.5
    distance = torch.arange(len(keys))[:, None] - torch.arange(len(keys))[None, :]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
