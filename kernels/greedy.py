"""The largest logit of every row and the lowest id that has it.

    peak[r] = max_j logits[r, j]        token[r] = min { j : logits[r, j] = peak[r] }

A peak is NaN where the row holds any NaN; the token then is the first of those. Logit and id make one integer that
sorts like the logit and, of equals, against the id: so chunks of a row are maxima of their own, in any order.
"""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.launching import next_power_of_two

CHUNK = 4096
"""Columns of a program."""
NUM_WARPS = 8
_LOWEST = tl.constexpr(-(2**63))
_MANY_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def largest_kernel(
    partial_ptr, logits_ptr, stride_logits, num_tokens, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid (R, NUM_CHUNKS). logits_ptr float32 [R, V], partial_ptr int64 [R, NUM_CHUNKS]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < num_tokens
    logits = tl.load(logits_ptr + row * stride_logits + ids, mask=inside, other=float("-inf"))
    logits = tl.where(logits == 0.0, 0.0, logits)  # -0.0 equals 0.0
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where(logits != logits, _MANY_NAN, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    keys = tl.where(inside, keys, _LOWEST)
    tl.store(partial_ptr + row * NUM_CHUNKS + chunk, tl.max(keys, 0))


@triton.jit
def join_largest_kernel(
    tokens_ptr, peaks_ptr, partial_ptr, NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr
):
    """Grid (R). tokens_ptr int64 [R], peaks_ptr float32 [R]."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    keys = tl.load(partial_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=_LOWEST)
    key = tl.max(keys, 0)
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    tl.store(tokens_ptr + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(peaks_ptr + row, bits.to(tl.float32, bitcast=True))


def greedy_tokens(logits: torch.Tensor, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens int64 [R] and peaks float32 [R] of ``logits`` float32 [R, V]; rows may lie apart."""
    num_rows, num_tokens = logits.shape
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.stride(1) == 1, f"strides {logits.stride()}: a row must lie together"
    num_chunks = triton.cdiv(num_tokens, chunk)
    partial = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    largest_kernel[(num_rows, num_chunks)](
        partial,
        logits,
        logits.stride(0),
        num_tokens,
        NUM_CHUNKS=num_chunks,
        CHUNK=chunk,
        num_warps=NUM_WARPS,
    )
    join_largest_kernel[(num_rows,)](
        tokens,
        peaks,
        partial,
        NUM_CHUNKS=num_chunks,
        PADDED_CHUNKS=next_power_of_two(num_chunks),
        num_warps=1,
    )
    return tokens, peaks


def greedy_tokens_twin(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, naively."""
    peaks = logits.amax(dim=-1)
    equal = (logits == peaks.unsqueeze(-1)) | (logits.isnan() & peaks.isnan().unsqueeze(-1))
    return equal.int().argmax(dim=-1), peaks
