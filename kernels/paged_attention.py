"""Attention over a paged KV cache in Triton: one kernel for decodes, chunks behind a prefix and whole prefills.

Per query token t of sequence s at position p, for query head h with KV head h // group, over the positions i
that p sees (i <= p, and i > p - window where there is one):

    score_i = scale * q[t, h] . K[s, i]              cap * tanh(score_i / cap) where there is a soft cap
    out[t, h] = sum_i softmax(score)_i V[s, i]

A program takes BLOCK_Q tokens of one sequence and one KV head: the query heads that share it are further rows of
one matrix, so that even a single token gives a tensor core 16 rows (the packing of vLLM's unified kernel). It walks
over tiles of TILE positions with a running maximum and sum (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023).

Split-KV (Flash-Decoding, Dao et al. 2023): where few programs would leave most of a device idle, the positions of a
sequence are cut into splits, each a program of its own, and `_merge_kernel` joins them. Splits are either a number
per sequence, chosen for speed, or of a fixed number of positions (SPLIT > 0, the invariant mode): then every row's
sums are made of the same terms in the same order whatever else is in the batch and however a prompt was cut, and a
program that walks over several splits joins them by the very arithmetic of `_merge_kernel`.

Offsets into the cache are 64 bits: a block's number times its size passes 2^31 in caches of ordinary size.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pagedserve.kernels.fp8 import e4m3_to_float
from pagedserve.kernels.interpreted import loop_bound, product


@triton.jit
def _find_sequence(starts_ptr, program, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence of a program: sequence s begins at program starts[s] // BLOCK_Q + s, its predecessors' at most."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(starts_ptr + middle) // BLOCK_Q + middle
        if begins <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


@triton.jit
def _attend_tile(
    query,
    row_position,
    row_valid,
    peak,
    total,
    mixed,
    tile,
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
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile's scores and values, taken into the running maximum [M], sum [M] and mix [M, D]."""
    dims = tl.arange(0, PADDED_DIM)
    position = tile * TILE + tl.arange(0, TILE)
    written = (position < end) & (position >= first_seen)
    if BLOCK_SIZE % TILE == 0:
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
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(peak - base)
    total = total * factor + tl.sum(weights, 1)
    mixed = mixed * factor[:, None] + product(weights.to(values.dtype), values, PRECISION, INTERPRETED)
    return higher, total, mixed


@triton.jit
def _join(peak, total, mixed, other_peak, other_total, other_mixed):
    """Two splits of one row, the earlier first; either may be empty (a peak of -inf)."""
    higher = tl.maximum(peak, other_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    mine = tl.exp2(peak - base)
    other = tl.exp2(other_peak - base)
    # Explicit, so that every compiler rounds at the same places.
    total = tl.fma(total, mine, other_total * other)
    mixed = tl.fma(mixed, mine[:, None], other_mixed * other[:, None])
    return higher, total, mixed


# Sizes that change from step to step: specialised, each kind of number would be compiled anew while serving.
@triton.jit(do_not_specialize=["num_sequences", "first_token", "stride_table"])
def paged_attention_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    query_ptr,
    layer_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    num_sequences,
    exponent,
    cap,
    cap_factor,
    value_scale,
    first_token,
    stride_query,
    stride_table,
    stride_block,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (programs, KV heads, NUM_SPLITS), programs = T // BLOCK_Q + S at most.

    query_ptr [T, H, D], the layer, tables [S, B], starts [S + 1] and contexts [S] as in `PagedBatch`, the last
    three of the launch's own sequences, whose first token is ``first_token``. Scores are in units of log 2:
    exponent is the scale times log2(e), unless there is a soft cap, after which cap_factor is that.

    NUM_SPLITS 1 writes out_ptr [T, H, D]. Above, it writes partial_ptr [T', H, NUM_SPLITS, D] and stats_ptr
    [T', H, NUM_SPLITS, 2] (maximum, sum), float32, of the launch's T' tokens. SPLIT: positions of a split, a
    multiple of TILE; 0: as many as give a program NUM_SPLITS of them.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    program = tl.program_id(0) + first_token // BLOCK_Q
    sequence = _find_sequence(starts_ptr, program, num_sequences, BLOCK_Q)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    first_row = (program - (start // BLOCK_Q + sequence)) * BLOCK_Q
    if first_row >= count:
        return
    context = tl.load(contexts_ptr + sequence)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    token = first_row + rows // GROUP
    row_valid = (token < count) & (rows < BLOCK_Q * GROUP)
    row_position = context + token
    row = (start + token).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    query = tl.load(
        query_ptr + row[:, None] * stride_query + head[:, None] * HEAD_DIM + dims[None, :],
        mask=row_valid[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    end = context + tl.minimum(first_row + BLOCK_Q, count)
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(0, context + first_row - WINDOW + 1)
    table = tables_ptr + sequence.to(tl.int64) * stride_table
    keys = layer_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    low = first_seen // TILE
    high = tl.cdiv(end, TILE)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if SPLIT > 0 and NUM_SPLITS == 1:
        first_part = low * TILE // SPLIT
        for part in range(loop_bound(first_part, INTERPRETED), loop_bound(tl.cdiv(end, SPLIT), INTERPRETED)):
            own_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            own_total = tl.zeros([BLOCK_M], tl.float32)
            own_mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
            first = tl.maximum(low, part * (SPLIT // TILE))
            behind = tl.minimum(high, (part + 1) * (SPLIT // TILE))
            for tile in range(loop_bound(first, INTERPRETED), loop_bound(behind, INTERPRETED)):
                own_peak, own_total, own_mixed = _attend_tile(
                    query, row_position, row_valid, own_peak, own_total, own_mixed, tile, end, first_seen,
                    table, keys, values, stride_block, exponent, cap, cap_factor,
                    BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE, WINDOW, HAS_CAP, IS_FP8, PRECISION, INTERPRETED,
                )  # fmt: skip
            peak, total, mixed = _join(peak, total, mixed, own_peak, own_total, own_mixed)
    else:
        if NUM_SPLITS > 1:
            tiles = tl.cdiv(high - low, NUM_SPLITS)
            if SPLIT > 0:
                first = split * (SPLIT // TILE)
                low = tl.maximum(low, first)
                high = tl.minimum(high, first + SPLIT // TILE)
            else:
                low = low + split * tiles
                high = tl.minimum(high, low + tiles)
        for tile in range(loop_bound(low, INTERPRETED), loop_bound(high, INTERPRETED)):
            peak, total, mixed = _attend_tile(
                query, row_position, row_valid, peak, total, mixed, tile, end, first_seen,
                table, keys, values, stride_block, exponent, cap, cap_factor,
                BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE, WINDOW, HAS_CAP, IS_FP8, PRECISION, INTERPRETED,
            )  # fmt: skip
    kept = row_valid[:, None] & (dims[None, :] < HEAD_DIM)
    if NUM_SPLITS == 1:
        place = row * (KV_HEADS * GROUP) + head
        result = mixed / tl.where(row_valid, total, 1.0)[:, None] * value_scale
        tl.store(
            out_ptr + place[:, None] * HEAD_DIM + dims[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=kept,
        )
    else:
        place = ((row - first_token) * (KV_HEADS * GROUP) + head) * NUM_SPLITS + split
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], mixed, mask=kept)
        tl.store(stats_ptr + place * 2, peak, mask=row_valid)
        tl.store(stats_ptr + place * 2 + 1, total, mask=row_valid)


@triton.jit(do_not_specialize=["num_rows"])
def merge_splits_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    value_scale,
    num_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (rows / BLOCK_R): rows are a token's heads, T * H of them, one after the other."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, PADDED_DIM)
    is_row = row < num_rows
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    mixed = tl.zeros([BLOCK_R, PADDED_DIM], tl.float32)
    for split in range(NUM_SPLITS):
        place = row * NUM_SPLITS + split
        own_peak = tl.load(stats_ptr + place * 2, mask=is_row, other=float("-inf"))
        own_total = tl.load(stats_ptr + place * 2 + 1, mask=is_row, other=0.0)
        # A split without positions wrote zeros.
        own_mixed = tl.load(
            partial_ptr + place[:, None] * HEAD_DIM + dims[None, :],
            mask=is_row[:, None] & (dims[None, :] < HEAD_DIM),
            other=0.0,
        )
        peak, total, mixed = _join(peak, total, mixed, own_peak, own_total, own_mixed)
    result = mixed / tl.where(is_row, total, 1.0)[:, None] * value_scale
    kept = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(
        out_ptr + row[:, None] * HEAD_DIM + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=kept
    )
