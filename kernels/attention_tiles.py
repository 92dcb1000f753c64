"""What a program of `paged_attention` does with tiles of the cache: read one, score it, take it in, join two walks.

A row of the M rows is one query head of one token. Its running state, as in FlashAttention-2, is the maximum of its
scores [M], the sum of exponentials above that [M], and the values mixed by them [M, D], not yet divided by the sum:

    m' = max(m, max_i score_i)
    l' = l 2^(m - m') + sum_i 2^(score_i - m')
    o' = o 2^(m - m') + sum_i 2^(score_i - m') V_i

Scores are in units of log 2, as the hardware's exponential is.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pagedserve.kernels.fp8 import e4m3_to_float
from pagedserve.kernels.interpreted import loop_bound, product


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Maximum, sum and mix of rows that have seen nothing."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)


@triton.jit
def attend_tiles(
    low,
    high,
    query,
    row_position,
    row_valid,
    end,
    first_seen,
    table_ptr,
    keys_ptr,
    values_ptr,
    stride_block,
    exponent,
    cap,
    cap_factor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The state of query's rows [M, D] after tiles ``low`` to ``high``, of positions first_seen to ``end``."""
    peak, total, mixed = empty_state(BLOCK_M, PADDED_DIM)
    for tile in range(loop_bound(low, INTERPRETED), loop_bound(high, INTERPRETED)):
        position = tile * TILE + tl.arange(0, TILE)
        written = (position < end) & (position >= first_seen)
        keys, values = _load_tile(
            tile, position, written, table_ptr, keys_ptr, values_ptr, stride_block,
            BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE,
        )  # fmt: skip
        if IS_FP8:
            keys = e4m3_to_float(keys).to(query.dtype)
            values = e4m3_to_float(values).to(query.dtype)
        scores = product(query, keys, PRECISION, INTERPRETED) * exponent
        if HAS_CAP:
            scores = cap * _tanh(scores / cap) * cap_factor
        seen = row_valid[:, None] & (position[None, :] <= row_position[:, None]) & written[None, :]
        if WINDOW > 0:
            seen = seen & (position[None, :] > row_position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, mixed = _take_in(peak, total, mixed, scores, values, PRECISION, INTERPRETED)
    return peak, total, mixed


@triton.jit
def _load_tile(
    tile,
    position,
    written,
    table_ptr,
    keys_ptr,
    values_ptr,
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys [D, TILE] and values [TILE, D] of a tile's positions, by the sequence's block table."""
    dims = tl.arange(0, PADDED_DIM)
    if BLOCK_SIZE % TILE == 0:  # the tile lies in one block
        block = tl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(tl.int64)
        slot = block * stride_block + (position % BLOCK_SIZE) * HEAD_DIM
    else:
        blocks = tl.load(table_ptr + position // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        slot = blocks * stride_block + (position % BLOCK_SIZE) * HEAD_DIM
    # What no token was written to may hold NaN, which a weight of zero would not stop: it is not read.
    keys = tl.load(
        keys_ptr + slot[None, :] + dims[:, None],
        mask=written[None, :] & (dims[:, None] < HEAD_DIM),
        other=0.0,
    )
    values = tl.load(
        values_ptr + slot[:, None] + dims[None, :],
        mask=written[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    return keys, values


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


@triton.jit
def _take_in(peak, total, mixed, scores, values, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """The state after one more tile, of scores [M, TILE] (-inf where hidden) and values [TILE, D]."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(peak - base)
    total = total * factor + tl.sum(weights, 1)
    mixed = mixed * factor[:, None] + product(weights.to(values.dtype), values, PRECISION, INTERPRETED)
    return higher, total, mixed


@triton.jit
def join(peak, total, mixed, other_peak, other_total, other_mixed):
    """The states of two splits of the same rows, the earlier first; either may be empty (a peak of -inf)."""
    higher = tl.maximum(peak, other_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    mine = tl.exp2(peak - base)
    other = tl.exp2(other_peak - base)
    # Explicit, so that every compiler rounds at the same places.
    total = tl.fma(total, mine, other_total * other)
    mixed = tl.fma(mixed, mine[:, None], other_mixed * other[:, None])
    return higher, total, mixed
