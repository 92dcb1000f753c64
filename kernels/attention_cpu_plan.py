"""What the CPU attention backend works out once a step: which blocks make which tiles, and what to mask.

A *tile* is a fixed number of consecutive positions of one sequence, counted from position 0, whatever the
batch. A decode group is cut into *levels*: level j holds the j-th tile of every sequence that has one,
longest sequences first, so that each level's sequences are a prefix of the level before, and sums over tiles
are plain slices.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.kv_cache import KVCache

MIN_TILE_TOKENS = 128
"""Tiles are this many tokens, or the nearest smaller multiple of the block size, at least one block."""
DECODE_TILES_AT_ONCE = 64
"""Tiles gathered before they are used: few enough for their copy to stay in the outer cache."""
QUERY_TILE = 64
"""Query tokens of a prefill chunk handled together."""


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """Sizes that hold for a whole run; ``blocks`` is blocks a tile."""

    tokens: int
    blocks: int
    block_size: int
    zero_block: int
    num_kv_heads: int

    @classmethod
    def of(cls, cache: KVCache) -> "TileGeometry":
        blocks = max(1, MIN_TILE_TOKENS // cache.block_size)
        return cls(blocks * cache.block_size, blocks, cache.block_size, cache.zero_block, cache.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Gather:
    """One copy out of the cache: ``num_tiles`` tiles of keys, then their values."""

    num_tiles: int
    rows: torch.Tensor
    """[2 * num_tiles * num_kv_heads * blocks] int64 rows of a layer seen as rows of one head's block."""
    unwritten: torch.Tensor | None
    """Rows of the copy, seen as rows of head_dim numbers, whose values no token wrote; None if none."""


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Some tiles of a decode group; ``sequence`` [n] says whose, by place in the group."""

    gather: Gather
    sequence: torch.Tensor
    masked: torch.Tensor | None
    """Which tiles have positions to hide; None if none has."""
    hidden: torch.Tensor | None
    """[len(masked), 1, 1, tile tokens] bool, True where the position must not be seen."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """All sequences with one query token, longest first; ``tokens`` [S] are their rows in the batch."""

    tokens: torch.Tensor
    level_sizes: tuple[int, ...]
    sequence: torch.Tensor
    """[sum(level_sizes)] place in the group of every tile, level by level."""
    chunks: tuple[DecodeChunk, ...]


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Query tokens ``start`` to ``stop`` of the batch, on tiles ``first`` to ``last`` of their gather."""

    start: int
    stop: int
    first: int
    last: int
    masked_from: int
    """Tiles from this one on (counted from ``first``) have positions to hide; with a window, all of them."""
    hidden: torch.Tensor
    """[tiles masked, 1, tokens, 1, tile tokens] bool."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence with several query tokens."""

    gather: Gather
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    decode: DecodeGroup | None
    prefills: tuple[PrefillChunk, ...]
    scratch_rows: int
    """Rows of the largest gather."""


def make_plan(batch: PagedBatch, cache: KVCache, spec: AttentionSpec) -> CpuPlan:
    """Split the batch into one decode group and the prefill chunks, and index both."""
    geometry = TileGeometry.of(cache)
    tables = batch.block_tables.numpy().astype(np.int64)
    starts = batch.query_start.numpy().astype(np.int64)
    contexts = batch.context_lens.numpy().astype(np.int64)
    counts = np.diff(starts)
    single = np.flatnonzero(counts == 1)
    decode = None
    if len(single):
        decode = _decode_group(tables[single], starts[single], contexts[single] + 1, geometry, spec)
    prefills = tuple(
        _prefill_chunk(tables[s], int(starts[s]), int(counts[s]), int(contexts[s]), geometry, spec)
        for s in np.flatnonzero(counts > 1)
    )
    gathers = [chunk.gather for chunk in prefills] + [
        chunk.gather for chunk in (decode.chunks if decode else ())
    ]
    return CpuPlan(decode, prefills, max((len(gather.rows) for gather in gathers), default=0))


def _decode_group(
    tables: np.ndarray, tokens: np.ndarray, lengths: np.ndarray, geometry: TileGeometry, spec: AttentionSpec
) -> DecodeGroup:
    first_seen = _first_seen(lengths - 1, spec.sliding_window)
    first_tile = first_seen // geometry.tokens
    num_tiles = -(-lengths // geometry.tokens) - first_tile
    order = np.argsort(-num_tiles, kind="stable")
    tables, tokens, lengths = tables[order], tokens[order], lengths[order]
    first_seen, first_tile, num_tiles = first_seen[order], first_tile[order], num_tiles[order]
    sizes = [int(np.count_nonzero(num_tiles > level)) for level in range(int(num_tiles[0]))]
    place = np.concatenate([np.arange(size) for size in sizes])
    tile = np.repeat(np.arange(len(sizes)), sizes) + first_tile[place]
    chunks = []
    for begin in range(0, len(place), DECODE_TILES_AT_ONCE):
        who, which = place[begin : begin + DECODE_TILES_AT_ONCE], tile[begin : begin + DECODE_TILES_AT_ONCE]
        positions = which[:, None] * geometry.tokens + np.arange(geometry.tokens)
        hidden = (positions >= lengths[who, None]) | (positions < first_seen[who, None])
        masked = np.flatnonzero(hidden.any(axis=1))
        chunks.append(
            DecodeChunk(
                gather=_gather(tables[who], which, lengths[who], first_seen[who], geometry),
                sequence=torch.from_numpy(who),
                masked=torch.from_numpy(masked) if len(masked) else None,
                hidden=torch.from_numpy(hidden[masked][:, None, None, :]) if len(masked) else None,
            )
        )
    return DecodeGroup(torch.from_numpy(tokens), tuple(sizes), torch.from_numpy(place), tuple(chunks))


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
                torch.from_numpy(np.ascontiguousarray(hidden))[:, None, :, None, :],
            )
        )
    return PrefillChunk(gather, tuple(parts))


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
        head_rows = ((len(tiles) + tile[:, None]) * heads + np.arange(heads)) * geometry.tokens + offset[
            :, None
        ]
        unwritten = torch.from_numpy(head_rows.reshape(-1))
    return Gather(len(tiles), torch.from_numpy(rows.reshape(-1)), unwritten)
