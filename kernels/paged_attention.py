"""Attention over a paged KV cache in Triton: one kernel for decodes, chunks behind a prefix and whole prefills.

Per query token t of sequence s at position p, for query head h with KV head h // group, over the positions i
that p sees (i <= p, and i > p - window where there is one):

    score_i = scale * q[t, h] . K[s, i]              cap * tanh(score_i / cap) where there is a soft cap
    out[t, h] = sum_i softmax(score)_i V[s, i]

A program takes BLOCK_Q tokens of one sequence and one KV head: the query heads that share it are further rows of
one matrix, so that even a single token gives a tensor core 16 rows (the packing of vLLM's unified kernel). It walks
over tiles of TILE positions with a running maximum and sum (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023).

Split-KV (Flash-Decoding, Dao et al. 2023): where few programs would leave most of a device idle, the positions of a
sequence are cut into splits, each a program of its own, and `merge_splits_kernel` joins them. Splits are either a
number per sequence, chosen for speed, or of a fixed number of positions (SPLIT > 0, the invariant mode): then every
row's sums are made of the same terms in the same order whatever else is in the batch and however a prompt was cut,
and a program that walks over several splits joins them by the very arithmetic of `merge_splits_kernel`.

Offsets into the cache are 64 bits: a block's number times its size passes 2^31 in caches of ordinary size.
"""

# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pagedserve.kernels.attention_tiles import attend_tiles, empty_state, join
from pagedserve.kernels.interpreted import loop_bound


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
def _load_query(
    query_ptr, place, head, row_valid, stride_query, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):
    """Query rows [M, D]: head ``head`` [M] of token ``place`` [M]."""
    dims = tl.arange(0, PADDED_DIM)
    return tl.load(
        query_ptr + place[:, None] * stride_query + head[:, None] * HEAD_DIM + dims[None, :],
        mask=row_valid[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )


@triton.jit
def _own_tiles(low, high, split, NUM_SPLITS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """A split's share of tiles ``low`` to ``high``: those of its positions, or one part in NUM_SPLITS."""
    if SPLIT > 0:
        low = tl.maximum(low, split * (SPLIT // TILE))
        high = tl.minimum(high, (split + 1) * (SPLIT // TILE))
    else:
        tiles = tl.cdiv(high - low, NUM_SPLITS)
        low = low + split * tiles
        high = tl.minimum(high, low + tiles)
    return low, high


@triton.jit
def _store_result(
    out_ptr, place, is_row, total, mixed, value_scale, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):
    """Write the mix over the sum to rows ``place`` of out_ptr [rows, D]."""
    dims = tl.arange(0, PADDED_DIM)
    result = mixed / tl.where(is_row, total, 1.0)[:, None] * value_scale
    tl.store(
        out_ptr + place[:, None] * HEAD_DIM + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims[None, :] < HEAD_DIM),
    )


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
    # The program's rows: BLOCK_Q tokens, the query heads of one group of each.
    rows = tl.arange(0, BLOCK_M)
    token = first_row + rows // GROUP
    row_valid = (token < count) & (rows < BLOCK_Q * GROUP)
    row_position = context + token
    row = (start + token).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    query = _load_query(query_ptr, row, head, row_valid, stride_query, HEAD_DIM, PADDED_DIM)
    # What they see: positions first_seen to end, in tiles low to high.
    end = context + tl.minimum(first_row + BLOCK_Q, count)
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(0, context + first_row - WINDOW + 1)
    low = first_seen // TILE
    high = tl.cdiv(end, TILE)
    table = tables_ptr + sequence.to(tl.int64) * stride_table
    keys = layer_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if SPLIT > 0 and NUM_SPLITS == 1:
        peak, total, mixed = empty_state(BLOCK_M, PADDED_DIM)
        first_part = low * TILE // SPLIT
        for part in range(loop_bound(first_part, INTERPRETED), loop_bound(tl.cdiv(end, SPLIT), INTERPRETED)):
            part_low, part_high = _own_tiles(low, high, part, NUM_SPLITS, SPLIT, TILE)
            own_peak, own_total, own_mixed = attend_tiles(
                part_low, part_high, query, row_position, row_valid, end, first_seen,
                table, keys, values, stride_block, exponent, cap, cap_factor, BLOCK_SIZE,
                HEAD_DIM, PADDED_DIM, BLOCK_M, TILE, WINDOW, HAS_CAP, IS_FP8, PRECISION, INTERPRETED,
            )  # fmt: skip
            peak, total, mixed = join(peak, total, mixed, own_peak, own_total, own_mixed)
    else:
        if NUM_SPLITS > 1:
            low, high = _own_tiles(low, high, split, NUM_SPLITS, SPLIT, TILE)
        peak, total, mixed = attend_tiles(
            low, high, query, row_position, row_valid, end, first_seen,
            table, keys, values, stride_block, exponent, cap, cap_factor, BLOCK_SIZE,
            HEAD_DIM, PADDED_DIM, BLOCK_M, TILE, WINDOW, HAS_CAP, IS_FP8, PRECISION, INTERPRETED,
        )  # fmt: skip
    if NUM_SPLITS == 1:
        place = row * (KV_HEADS * GROUP) + head
        _store_result(out_ptr, place, row_valid, total, mixed, value_scale, HEAD_DIM, PADDED_DIM)
    else:
        dims = tl.arange(0, PADDED_DIM)
        kept = row_valid[:, None] & (dims[None, :] < HEAD_DIM)
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
    peak, total, mixed = empty_state(BLOCK_R, PADDED_DIM)
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
        peak, total, mixed = join(peak, total, mixed, own_peak, own_total, own_mixed)
    _store_result(out_ptr, row, is_row, total, mixed, value_scale, HEAD_DIM, PADDED_DIM)
