"""What the CPU attention backend works out once a step: which blocks make which tiles, and what to mask.

A *tile* is a fixed number of consecutive positions of one sequence, counted from position 0, whatever the
batch. A group of sequences (all that decode, say) is cut into *levels*: level j holds the j-th tile of every
sequence that has one, longest sequences first, so that each level's sequences are a prefix of the level
before, and sums over tiles are plain slices.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.kv_cache import KVCache

TILE_TOKENS = 64
TILE_MULTIPLE = 32
"""Tiles are at most ``TILE_TOKENS``, but whole blocks and a multiple of ``TILE_MULTIPLE`` in any case."""
GATHER_BYTES = 6 << 20
"""A group's tiles are copied out this much at a time (at least one tile), to stay in the outer cache."""
GROUP_ROWS = (1, 16)
"""Sequences with up to this many query tokens are handled together, padded to it; longer chunks one by one."""
QUERY_TILE = 64
"""Query tokens of a long chunk handled together."""


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """Sizes that hold for a whole run; ``blocks`` is blocks a tile, ``at_once`` the decode tiles of a gather."""

    tokens: int
    blocks: int
    at_once: int
    block_size: int
    zero_block: int
    num_kv_heads: int

    @classmethod
    def of(cls, cache: KVCache) -> "TileGeometry":
        unit = math.lcm(cache.block_size, TILE_MULTIPLE)
        tokens = unit * max(1, TILE_TOKENS // unit)
        tile_bytes = 2 * cache.num_kv_heads * tokens * cache.head_dim * cache.data.element_size()
        at_once = max(1, GATHER_BYTES // tile_bytes)
        return cls(
            tokens,
            tokens // cache.block_size,
            at_once,
            cache.block_size,
            cache.zero_block,
            cache.num_kv_heads,
        )


@dataclass(frozen=True, slots=True)
class Gather:
    """One copy out of the cache: ``num_tiles`` tiles of keys, then their values."""

    num_tiles: int
    rows: torch.Tensor
    """[2 * num_tiles * num_kv_heads * blocks] int64 rows of a layer seen as rows of one head's block."""
    unwritten: torch.Tensor | None
    """Rows of the copy, seen as rows of head_dim numbers, that no token wrote; None if none. To be zeroed:
    what they hold, NaN perhaps, must not meet a weight of 0 or a bias of -inf."""


@dataclass(frozen=True, slots=True)
class GroupChunk:
    """Some tiles of a group; ``sequence`` [n] says whose, by place in the group."""

    gather: Gather
    sequence: torch.Tensor
    masked: torch.Tensor | None
    """Which tiles have positions to hide; None if none has."""
    bias: torch.Tensor | None
    """[len(masked), 1, rows, 1, tile tokens] float32: -inf where a position must not be seen, 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Sequences with up to ``rows`` query tokens each, longest first."""

    rows: int
    tile_tokens: int
    tokens: torch.Tensor
    """[S, rows] tokens of the batch; a sequence with fewer repeats its last one."""
    kept: torch.Tensor | None
    """Which of the S * rows are no repetition; None if none is."""
    written: torch.Tensor
    """The tokens of the batch that those are."""
    level_sizes: tuple[int, ...]
    sequence: torch.Tensor
    """[sum(level_sizes)] place in the group of every tile, level by level."""
    chunks: tuple[GroupChunk, ...]


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Query tokens ``start`` to ``stop`` of the batch, on tiles ``first`` to ``last`` of their gather."""

    start: int
    stop: int
    first: int
    last: int
    masked_from: int
    """Tiles from this one on (counted from ``first``) have positions to hide; with a window, all of them."""
    bias: torch.Tensor
    """[tiles masked, 1, tokens, 1, tile tokens] float32, as in a group chunk."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence with many query tokens."""

    gather: Gather
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    groups: tuple[QueryGroup, ...]
    prefills: tuple[PrefillChunk, ...]
    scratch_rows: int
    """Rows of the largest gather."""


def make_plan(batch: PagedBatch, cache: KVCache, spec: AttentionSpec) -> CpuPlan:
    """Split the batch into groups of sequences with few query tokens and single long chunks; index both."""
    geometry = TileGeometry.of(cache)
    tables = batch.block_tables.numpy().astype(np.int64)
    starts = batch.query_start.numpy().astype(np.int64)
    contexts = batch.context_lens.numpy().astype(np.int64)
    counts, starts = np.diff(starts), starts[:-1]
    groups, above = [], 0
    for rows in GROUP_ROWS:
        who = np.flatnonzero((counts > above) & (counts <= rows))
        if len(who):
            groups.append(_group(rows, tables[who], starts[who], counts[who], contexts[who], geometry, spec))
        above = rows
    prefills = tuple(
        _prefill_chunk(tables[s], int(starts[s]), int(counts[s]), int(contexts[s]), geometry, spec)
        for s in np.flatnonzero(counts > above)
    )
    gathers = [chunk.gather for group in groups for chunk in group.chunks]
    gathers += [chunk.gather for chunk in prefills]
    return CpuPlan(tuple(groups), prefills, max((len(gather.rows) for gather in gathers), default=0))


def _group(
    rows: int,
    tables: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    contexts: np.ndarray,
    geometry: TileGeometry,
    spec: AttentionSpec,
) -> QueryGroup:
    lengths = contexts + counts
    first_tile = _first_seen(contexts, spec.sliding_window) // geometry.tokens
    num_tiles = -(-lengths // geometry.tokens) - first_tile
    order = np.argsort(-num_tiles, kind="stable")
    tables, contexts, lengths, first_tile = tables[order], contexts[order], lengths[order], first_tile[order]
    sizes = [int(np.count_nonzero(num_tiles > level)) for level in range(int(num_tiles.max()))]
    place = np.concatenate([np.arange(size) for size in sizes])
    tile = np.repeat(np.arange(len(sizes)), sizes) + first_tile[place]
    queries = np.minimum(contexts[:, None] + np.arange(rows), lengths[:, None] - 1)  # positions [S, rows]
    seen_from = _first_seen(queries, spec.sliding_window)
    chunks = []
    for begin in range(0, len(place), geometry.at_once):
        who, which = place[begin : begin + geometry.at_once], tile[begin : begin + geometry.at_once]
        gather = _gather(tables[who], which, lengths[who], seen_from[who, 0], geometry)
        keys = which[:, None] * geometry.tokens + np.arange(geometry.tokens)
        chunks.append(_group_chunk(gather, who, keys, queries[who], seen_from[who]))
    tokens = starts[order, None] + (queries - contexts[:, None])
    fresh = (np.arange(rows) < (lengths - contexts)[:, None]).reshape(-1)
    return QueryGroup(
        rows=rows,
        tile_tokens=geometry.tokens,
        tokens=torch.from_numpy(tokens),
        kept=None if fresh.all() else torch.from_numpy(np.flatnonzero(fresh)),
        written=torch.from_numpy(tokens.reshape(-1)[fresh]),
        level_sizes=tuple(sizes),
        sequence=torch.from_numpy(place),
        chunks=tuple(chunks),
    )


def _group_chunk(
    gather: Gather, sequence: np.ndarray, keys: np.ndarray, queries: np.ndarray, seen_from: np.ndarray
) -> GroupChunk:
    """Mask tiles with key positions [n, T] for queries at [n, rows], which see from ``seen_from`` [n, rows] on."""
    edge = np.flatnonzero((keys[:, -1] > queries[:, 0]) | (keys[:, 0] < seen_from[:, -1]))
    keys = keys[:, None, :]
    hidden = (keys[edge] > queries[edge, :, None]) | (keys[edge] < seen_from[edge, :, None])
    return GroupChunk(
        gather=gather,
        sequence=torch.from_numpy(sequence),
        masked=torch.from_numpy(edge) if len(edge) else None,
        bias=_bias(hidden[:, None, :, None, :]) if len(edge) else None,
    )


def _prefill_chunk(
    table: np.ndarray, start: int, count: int, context: int, geometry: TileGeometry, spec: AttentionSpec
) -> PrefillChunk:
    length = context + count
    oldest = int(_first_seen(np.array([context]), spec.sliding_window)[0])
    base = oldest // geometry.tokens
    tiles = np.arange(base, -(-length // geometry.tokens))
    same = np.ones(len(tiles), dtype=np.int64)
    gather = _gather(np.tile(table, (len(tiles), 1)), tiles, same * length, same * oldest, geometry)
    parts = []
    for begin in range(0, count, QUERY_TILE):
        end = min(begin + QUERY_TILE, count)
        positions = np.arange(context + begin, context + end)
        first_seen = _first_seen(positions, spec.sliding_window)
        first, last = int(first_seen[0]) // geometry.tokens, int(positions[-1]) // geometry.tokens + 1
        clear = int(positions[0] + 1) // geometry.tokens - first if spec.sliding_window is None else 0
        keys = np.arange((first + clear) * geometry.tokens, last * geometry.tokens)
        hidden = (keys[None, :] > positions[:, None]) | (keys[None, :] < first_seen[:, None])
        hidden = hidden.reshape(len(positions), -1, geometry.tokens).swapaxes(0, 1)
        parts.append(
            QueryTile(
                start + begin,
                start + end,
                first - base,
                last - base,
                clear,
                _bias(hidden[:, None, :, None, :]),
            )
        )
    return PrefillChunk(gather, tuple(parts))


def _bias(hidden: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0)))


def _first_seen(positions: np.ndarray, window: int | None) -> np.ndarray:
    """Oldest position that a query at each of ``positions`` sees."""
    return np.zeros_like(positions) if window is None else np.maximum(0, positions - window + 1)


def _gather(
    tables: np.ndarray, tiles: np.ndarray, lengths: np.ndarray, first_seen: np.ndarray, geometry: TileGeometry
) -> Gather:
    """Index tile ``tiles[i]`` of the table ``tables[i]``; blocks that nobody sees become the zero block."""
    heads, size = geometry.num_kv_heads, geometry.block_size
    index = tiles[:, None] * geometry.blocks + np.arange(geometry.blocks)
    blocks = np.take_along_axis(tables, np.minimum(index, tables.shape[1] - 1), axis=1)
    unseen = (index * size >= lengths[:, None]) | ((index + 1) * size <= first_seen[:, None])
    blocks = np.where(unseen, geometry.zero_block, blocks)
    lanes = np.arange(2 * heads).reshape(2, 1, heads, 1)  # keys then values, head by head
    rows = blocks[None, :, None, :] * (2 * heads) + lanes
    positions = tiles[:, None] * geometry.tokens + np.arange(geometry.tokens)
    written_to = -(-lengths // size) * size
    tile, offset = np.nonzero((positions >= lengths[:, None]) & (positions < written_to[:, None]))
    unwritten = None
    if len(tile):
        lane_rows = (np.arange(2)[:, None, None] * len(tiles) + tile[:, None]) * heads + np.arange(heads)
        unwritten = torch.from_numpy((lane_rows * geometry.tokens + offset[:, None]).reshape(-1))
    return Gather(len(tiles), torch.from_numpy(rows.reshape(-1)), unwritten)
