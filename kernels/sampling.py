"""Random tokens of a batch of rows: temperature, min_p, top_k and top_p, without sorting a row.

The definitions are those of `pagedserve.engine.sampling`: fixed-point weights, exact integer sums, and the inverse
of the cumulative distribution in token-id order. Equal weights and words give equal tokens. Per row, with peak m:

    w_j = floor(2^40 exp((logit_j - m) / temperature)),  0 where below min_weight
    top_k keeps the k largest w, of equals the lower ids; top_p the fewest of those that hold ceil(top_p * sum)
    token = the first j at which the running sum of what is kept exceeds floor(sum * word / 2^32)

`weigh_kernel` writes the weights over the logits, as float32, which holds each exactly (24 significant bits), and
the sum and number of each chunk. `choose_kernel` has a program for each row. What a filter keeps is named by a
floor and a quota: all above the floor, and the first so many at it. The floor is found by halving the interval
that it lies in, whose ends move on to weights that are there: about log2 of the number of different weights near
it, at most 29 passes over the row, and none where there is no filter. A sort of the row would take more memory
traffic and a scratch of its size; other widths than two-way were reckoned and gain little, as the passes wait for
the cache and not for arithmetic.
"""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Columns of a program and of one turn of a loop."""
WEIGH_WARPS = 8
CHOOSE_WARPS = 8
CHOOSE_REGISTERS = 128
"""Of a thread. Left alone, one assembler (Triton 3.8, sm_90) takes 80 and spills."""
MAX_VOCAB = 2**22
"""So many weights of 2^40 sum to less than 2^63."""
_ONE = tl.constexpr(2.0**40)  # the peak's own weight
_PEAK_BITS = tl.constexpr((127 + 40) << 23)
_LEAST_BITS = tl.constexpr(127 << 23)  # of weight 1, the smallest that is not zero


@triton.jit
def weigh_kernel(
    logits_ptr,
    masses_ptr,
    counts_ptr,
    rows_ptr,
    peaks_ptr,
    temperature_ptr,
    min_weight_ptr,
    stride_logits,
    num_tokens,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (S, NUM_CHUNKS). rows_ptr int64 [S] names rows of logits_ptr float32 [R, V], which become weights.

    peaks_ptr float32 [R]; temperature_ptr float32 [S]; min_weight_ptr int64 [S]; masses_ptr int64 and counts_ptr
    int32 [S, NUM_CHUNKS]. In a row whose peak is not finite all weigh the same.
    """
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + index)
    peak = tl.load(peaks_ptr + row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < num_tokens
    place = logits_ptr + row * stride_logits + ids
    below = tl.load(place, mask=inside, other=float("-inf")) - peak
    temperature = tl.zeros([CHUNK], tl.float32) + tl.load(temperature_ptr + index)
    weights = tl.floor(tl.exp(tl.div_rn(below, temperature)) * _ONE)
    weights = tl.where(tl.abs(peak) < float("inf"), weights, _ONE)
    weights = tl.where(inside & (weights.to(tl.int64) >= tl.load(min_weight_ptr + index)), weights, 0.0)
    tl.store(place, weights, mask=inside)
    out = index * NUM_CHUNKS + chunk
    tl.store(masses_ptr + out, tl.sum(weights.to(tl.int64), 0))
    tl.store(counts_ptr + out, tl.sum((weights > 0.0).to(tl.int32), 0))


@triton.jit
def _bits(place, inside):
    """Weights as integers that sort like them: positive float32 do by their bits."""
    return tl.load(place, mask=inside, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _weight(bits):
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _find_floor(
    weights_ptr,
    num_tokens,
    low,
    need,
    BY_MASS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Bits of the largest weight so that it and those above hold ``need``, and what those above it hold.

    What is held is their number or their sum. All at ``low`` and above must hold ``need`` >= 1.
    """
    # Four numbers side by side are one load of a thread, which takes them together before it keeps them.
    columns = tl.arange(0, CHUNK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    high = low * 0 + _PEAK_BITS
    above = need * 0
    while low < high:
        pivot = low + (high - low + 1) // 2
        held = tl.zeros([CHUNK // 4], tl.int64)
        next_up = tl.full([CHUNK // 4], _PEAK_BITS, tl.int32)
        next_down = tl.zeros([CHUNK // 4], tl.int32)
        for chunk in range(NUM_CHUNKS):
            ids = chunk * CHUNK + columns
            bits = _bits(weights_ptr + ids, ids < num_tokens)
            is_up = bits >= pivot
            if BY_MASS:
                held += tl.sum(tl.where(is_up, _weight(bits), 0), 1)
            else:
                held += tl.sum(is_up.to(tl.int32), 1)
            next_up = tl.minimum(next_up, tl.min(tl.where(is_up, bits, _PEAK_BITS), 1))
            next_down = tl.maximum(next_down, tl.max(tl.where(is_up, 0, bits), 1))
        total = tl.sum(held, 0)
        if total >= need:
            low = tl.min(next_up, 0)
        else:
            high = tl.max(next_down, 0)
            above = total
    return low, above


@triton.jit
def _mass_above(weights_ptr, num_tokens, floor, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Sum of the weights above the floor."""
    columns = tl.arange(0, CHUNK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    held = tl.zeros([CHUNK // 4], tl.int64)
    for chunk in range(NUM_CHUNKS):
        ids = chunk * CHUNK + columns
        bits = _bits(weights_ptr + ids, ids < num_tokens)
        held += tl.sum(tl.where(bits > floor, _weight(bits), 0), 1)
    return tl.sum(held, 0)


@triton.jit
def _find_chunk(weights_ptr, num_tokens, floor, quota, target, CHUNK: tl.constexpr):
    """The chunk in which the running sum passes the target: its start, the sum before, and the quota left in it."""
    columns = tl.arange(0, CHUNK)
    floor_weight = _weight(floor)
    start = 0
    before = target * 0
    step = before
    used = before
    while (before + step <= target) & (start < num_tokens):  # the latter always, unless the sums were wrong
        # The first turn adds nothing: `start` is the chunk of which `step` is the sum, once a turn is made.
        before += step
        ids = start + columns
        bits = _bits(weights_ptr + ids, ids < num_tokens)
        at_floor = tl.minimum(tl.sum((bits == floor).to(tl.int64), 0), quota)
        step = tl.sum(tl.where(bits > floor, _weight(bits), 0), 0) + at_floor * floor_weight
        quota -= at_floor
        used = at_floor
        start += CHUNK
    return start - CHUNK, before, quota + used


@triton.jit
def choose_kernel(
    tokens_ptr,
    weights_ptr,
    masses_ptr,
    counts_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    words_ptr,
    stride_weights,
    num_tokens,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (S). tokens_ptr int64 [R]: written at the rows in rows_ptr. weights_ptr, masses_ptr, counts_ptr: as
    `weigh_kernel` leaves them. top_k_ptr, words_ptr int64 [S]; top_p_ptr float64 [S].
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    weights_ptr += row * stride_weights
    chunks = tl.arange(0, PADDED_CHUNKS)
    is_chunk = chunks < NUM_CHUNKS
    masses = tl.load(masses_ptr + index * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    counts = tl.load(counts_ptr + index * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    top_k = tl.load(top_k_ptr + index)
    top_p = tl.load(top_p_ptr + index)
    word = tl.load(words_ptr + index)
    mass = tl.sum(masses, 0)
    count = tl.sum(counts, 0).to(tl.int64)
    floor = tl.full([], _LEAST_BITS, tl.int32)
    quota = count
    if top_k < count:
        floor, above = _find_floor(weights_ptr, num_tokens, floor, top_k, False, NUM_CHUNKS, CHUNK)
        quota = top_k - above
        mass = _mass_above(weights_ptr, num_tokens, floor, NUM_CHUNKS, CHUNK) + quota * _weight(floor)
    if top_p < 1.0:
        limit = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
        floor, above = _find_floor(weights_ptr, num_tokens, floor, limit, True, NUM_CHUNKS, CHUNK)
        quota = (limit - above + _weight(floor) - 1) // _weight(floor)
        mass = above + quota * _weight(floor)
    # floor(mass * word / 2^32) in 63 bits, as `fixed_point.scaled_target`.
    target = ((mass >> 31) * word + (((mass & 0x7FFFFFFF) * word) >> 31)) >> 1
    if (top_k < count) | (top_p < 1.0):
        start, before, quota = _find_chunk(weights_ptr, num_tokens, floor, quota, target, CHUNK)
    else:
        passed = tl.cumsum(masses, 0) <= target
        start = tl.sum(passed.to(tl.int32), 0) * CHUNK
        before = tl.sum(tl.where(passed, masses, 0), 0)
    ids = start + tl.arange(0, CHUNK)
    bits = _bits(weights_ptr + ids, ids < num_tokens)
    at_floor = bits == floor
    within = tl.cumsum(at_floor.to(tl.int32), 0) <= quota
    kept = tl.where((bits > floor) | (at_floor & within), _weight(bits), 0)
    running = before + tl.cumsum(kept, 0)
    tl.store(tokens_ptr + row, start + tl.sum((running <= target).to(tl.int32), 0))


def weigh(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    min_weight: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the ``rows`` of ``logits`` into weights; return sums int64 and numbers int32 [S, chunks] of each chunk.

    logits: float32 [R, V], a row's numbers together. peaks: float32 [R]. rows, min_weight: int64 [S].
    temperature: float32 [S].
    """
    num_tokens, num_rows = logits.shape[1], len(rows)
    assert logits.dtype == peaks.dtype == temperature.dtype == torch.float32, "logits, peaks, temperatures"
    assert rows.dtype == min_weight.dtype == torch.int64, f"{rows.dtype} and {min_weight.dtype}"
    assert logits.stride(1) == 1, f"strides {logits.stride()}: a row must lie together"
    assert num_tokens <= MAX_VOCAB, f"a vocabulary of {num_tokens} can overflow 63 bits"
    num_chunks = triton.cdiv(num_tokens, chunk)
    masses = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    counts = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    weigh_kernel[(num_rows, num_chunks)](
        logits,
        masses,
        counts,
        rows,
        peaks,
        temperature,
        min_weight,
        logits.stride(0),
        num_tokens,
        NUM_CHUNKS=num_chunks,
        CHUNK=chunk,
        num_warps=WEIGH_WARPS,
    )
    return masses, counts


def choose(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    words: torch.Tensor,
    chunk: int = CHUNK,
) -> None:
    """Write to ``tokens`` int64 [R], at ``rows`` [S]; weights and sums as `weigh` leaves them, same chunk.

    top_k: int64 [S], >= 1, the vocabulary size for off. top_p: float64 [S], above 0, 1 for off. words: int64 [S].
    """
    num_chunks = sums[0].shape[1]
    assert num_chunks == triton.cdiv(weights.shape[1], chunk), f"{num_chunks} chunks of {chunk}"
    assert tokens.dtype == rows.dtype == top_k.dtype == words.dtype == torch.int64, (
        "tokens, rows, top_k, words"
    )
    assert top_p.dtype == torch.float64, f"top_p is {top_p.dtype}"
    choose_kernel[(len(rows),)](
        tokens,
        weights,
        *sums,
        rows,
        top_k,
        top_p,
        words,
        weights.stride(0),
        weights.shape[1],
        NUM_CHUNKS=num_chunks,
        PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        num_warps=CHOOSE_WARPS,
        maxnreg=CHOOSE_REGISTERS,
    )
