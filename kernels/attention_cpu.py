"""Paged attention for CPUs, made of batched matrix products that are fast there.

The query heads that share a KV head are rows of one matrix, so a decode step multiplies [group, D] by
[D, tile] for every (tile, KV head) at once, and a prefill chunk [tokens * group, D]. Short chunks of several
sequences go together, padded to one length. Blocks are copied into tiles first (one gather for keys and
values, into memory that is reused and stays in cache). Each tile gets its own softmax maximum and sum; tiles
are then merged in order of position (Milakov & Gimelshein 2018; the split is Flash-Decoding's, but by a fixed
number of tokens).

Since a tile's bounds depend on position only, and every product has the same inner sizes whatever the batch,
a token's result does not depend on its neighbours or on how its prompt was cut: the same additions happen in
the same order. (A library that sums in another order for other numbers of rows could still break this. Two
such cases are known, and avoided by padding: MKL in float32, and torch for very small bfloat16 products.)
"""

import math

import torch

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.attention_cpu_plan import (
    CpuPlan,
    Gather,
    QueryGroup,
    QueryTile,
    make_plan,
)
from pagedserve.kernels.kv_cache import UNSCALED, KVCache, Scales

_SCORES_AT_ONCE = 1 << 19
"""Scores of a prefill tile group: about two megabytes in float32, which stays in the outer cache."""
_LOWEST = -1e30
"""Stands for the maximum of a row whose every score is hidden: finite, so that differences are not NaN."""
_MIN_ROWS = 4
"""Rows below which MKL sums a float32 product in another order."""
_MAX_SMALL_PRODUCT = 16 * 16 * 16
"""Multiplications up to which torch does not give a bfloat16 product to oneDNN."""

_Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Maxima and sums [tiles, KVH, M, 1] and unnormalised outputs [tiles, KVH, M, D], float32."""


class CpuAttention:
    """See ``AttentionBackend``. float32 and bfloat16; keeps one scratch buffer, so one thread at a time."""

    __slots__ = ("_exponent", "_scratch", "name", "spec")

    def __init__(self, spec: AttentionSpec) -> None:
        self.name = "cpu"
        self.spec = spec
        self._exponent = spec.scale * math.log2(math.e)
        self._scratch = torch.empty(0)

    def prepare(self, batch: PagedBatch, cache: KVCache) -> CpuPlan:
        """Index the step's tiles; see ``CpuPlan``."""
        plan = make_plan(batch, cache, self.spec)
        size = plan.scratch_rows * cache.block_size * cache.head_dim
        if self._scratch.dtype != cache.data.dtype or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=cache.data.dtype)
        return plan

    def attend(
        self, query: torch.Tensor, layer: torch.Tensor, plan: CpuPlan, scales: Scales = UNSCALED
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for ``query`` of that shape."""
        assert scales == UNSCALED, f"scales {scales} for a cache of {layer.dtype}"
        spec = self.spec
        out = torch.empty(query.shape, dtype=query.dtype)
        grouped = query.view(query.shape[0], spec.num_kv_heads, spec.group, spec.head_dim)
        grouped_out = out.view(grouped.shape)
        for group in plan.groups:
            result = self._query_group(grouped, layer, group)
            grouped_out.index_copy_(0, group.written, result if group.kept is None else result[group.kept])
        for chunk in plan.prefills:
            keys, values = self._gather(layer, chunk.gather)
            for tile in chunk.tiles:
                grouped_out[tile.start : tile.stop] = self._query_tile(grouped, keys, values, tile)
        return out

    def _query_group(self, grouped: torch.Tensor, layer: torch.Tensor, group: QueryGroup) -> torch.Tensor:
        """Few tokens of many sequences: the result is [S * rows, KVH, G, D], in the group's order."""
        _, heads, size, width = grouped.shape
        num_rows = group.rows * size
        query = grouped.index_select(0, group.tokens.view(-1)).view(-1, group.rows, heads, size, width)
        query = _padded(query.transpose(1, 2).reshape(-1, heads, num_rows, width), group.tile_tokens)
        partials: list[_Partial] = []
        for chunk in group.chunks:
            keys, values = self._gather(layer, chunk.gather)
            scores = _matmul(query.index_select(0, chunk.sequence), keys.transpose(2, 3)).float()
            if chunk.masked is not None and chunk.bias is not None:
                every = len(chunk.masked) == len(scores)
                part = scores if every else scores.index_select(0, chunk.masked)
                part[:, :, :num_rows].view(-1, heads, group.rows, size, part.shape[3]).add_(chunk.bias)
                if not every:
                    scores.index_copy_(0, chunk.masked, part)
            partials.append(_weigh(scores, values, self._exponent))
        merged = _merge(_join(partials), group.level_sizes, group.sequence, self._exponent)[:, :, :num_rows]
        merged = merged.view(-1, heads, group.rows, size, width).transpose(1, 2)
        return merged.reshape(-1, heads, size, width).to(layer.dtype)

    def _query_tile(
        self, grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: QueryTile
    ) -> torch.Tensor:
        """Many tokens of one sequence: the result is [tokens, KVH, G, D]."""
        source = grouped[tile.start : tile.stop]
        count, heads, size, width = source.shape
        query = _padded(source.transpose(0, 1).reshape(1, heads, count * size, width), keys.shape[2])
        step = max(1, _SCORES_AT_ONCE // (heads * query.shape[2] * keys.shape[2]))
        masked_from, partials = tile.first + tile.masked_from, []
        for begin in range(tile.first, tile.last, step):
            end = min(begin + step, tile.last)
            scores = _matmul(query.expand(end - begin, -1, -1, -1), keys[begin:end].transpose(2, 3)).float()
            clear = max(0, masked_from - begin)
            if clear < end - begin:
                part = scores[clear:, :, : count * size].view(-1, heads, count, size, keys.shape[2])
                part.add_(tile.bias[begin + clear - masked_from : end - masked_from])
            partials.append(_weigh(scores, values[begin:end], self._exponent))
        merged = _merge(_join(partials), (1,) * (tile.last - tile.first), None, self._exponent)
        return merged[0, :, : count * size].view(heads, count, size, width).transpose(0, 1)

    def _gather(self, layer: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy tiles out of the cache: keys, values, each [tiles, KVH, T, D]; valid until the next gather."""
        _, _, heads, block_size, width = layer.shape
        size = len(gather.rows) * block_size * width
        copied = self._scratch[:size].view(len(gather.rows), block_size * width)
        torch.index_select(layer.view(-1, block_size * width), 0, gather.rows, out=copied)
        if gather.unwritten is not None:
            copied.view(-1, width).index_fill_(0, gather.unwritten, 0.0)
        keys, values = copied.view(2, gather.num_tiles, heads, -1, width)
        return keys, values


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product over the two leading axes.

    A single float32 product is done twice over: BLAS would split its rows over threads, and sum a
    remainder of fewer than four rows in another order.
    """
    tiles, heads = left.shape[:2]
    flat = left.reshape(tiles * heads, left.shape[2], left.shape[3])
    other = right.reshape(tiles * heads, right.shape[2], right.shape[3])
    if tiles * heads == 1 and left.dtype == torch.float32:
        product = torch.bmm(flat.expand(2, -1, -1), other.expand(2, -1, -1))[:1]
    else:
        product = torch.bmm(flat, other)
    return product.view(tiles, heads, left.shape[2], right.shape[3])


def _padded(query: torch.Tensor, tile_tokens: int) -> torch.Tensor:
    """Add rows of zeros to ``query`` [n, KVH, M, D] up to where a product's kernel no longer changes."""
    enough = _MIN_ROWS
    if query.dtype != torch.float32:
        enough = _MAX_SMALL_PRODUCT // (query.shape[3] * tile_tokens) + 1
    missing = enough - query.shape[2]
    return torch.nn.functional.pad(query, (0, 0, 0, missing)) if missing > 0 else query


def _weigh(scores: torch.Tensor, values: torch.Tensor, exponent: float) -> _Partial:
    """Turn scores of tiles into maxima, sums of exponentials and weighted values; overwrites ``scores``.

    exp(scale * (s - max)) is computed as 2 ** (exponent * s - exponent * max): one fused pass and torch's own
    exp2, several times faster than its exp, which goes through MKL and is slow where the result underflows.
    exp2 takes other code for what is left over by vectors of 32; tiles are multiples of that.
    """
    peak = scores.amax(dim=-1, keepdim=True).clamp_(min=_LOWEST)
    weights = torch.add(peak * -exponent, scores, alpha=exponent, out=scores).exp2_()
    return peak, weights.sum(dim=-1, keepdim=True), _matmul(weights.to(values.dtype), values).float()


def _join(partials: list[_Partial]) -> _Partial:
    if len(partials) == 1:
        return partials[0]
    peaks, sums, outputs = zip(*partials, strict=True)
    return torch.cat(peaks), torch.cat(sums), torch.cat(outputs)


def _merge(
    partial: _Partial, level_sizes: tuple[int, ...], sequence: torch.Tensor | None, exponent: float
) -> torch.Tensor:
    """Merge tiles, level by level, into [S, KVH, M, D]; ``sequence`` says whose each is (None: all one's).

    Overwrites ``partial``.
    """
    peaks, sums, outputs = partial
    num_sequences = level_sizes[0]
    if len(level_sizes) > 1:
        highest, begin = peaks[:num_sequences].clone(), num_sequences
        for size in level_sizes[1:]:
            torch.maximum(highest[:size], peaks[begin : begin + size], out=highest[:size])
            begin += size
        behind = peaks - (highest if sequence is None else highest.index_select(0, sequence))
        factor = behind.mul_(
            exponent * math.log(2)
        ).exp_()  # not exp2, whose last few of any number are special
        sums, outputs = sums.mul_(factor), outputs.mul_(factor)
    total, mixed, begin = sums[:num_sequences], outputs[:num_sequences], num_sequences
    for size in level_sizes[1:]:
        total[:size] += sums[begin : begin + size]
        mixed[:size] += outputs[begin : begin + size]
        begin += size
    return mixed / total
