"""Root-mean-square norm (Zhang & Sennrich 2019) of rows, and the same behind the addition of a residual.

For a row x [n] and weights w [n], in float32 inside and rounded once at the end:

    out = x / sqrt(mean(x^2) + eps) * w

Fused with the addition that comes before every norm of a transformer but the first, the row is read and written
once instead of twice:

    x = x + delta        in place, rounded to the row's dtype, as an addition of its own would
    out = norm(x)

A program keeps a few rows in registers: a row's sum has one order, whatever the number of rows.
"""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.launching import next_power_of_two

MAX_SIZE = 32768
"""Numbers of a row that fit the registers of a program."""
TILE = 2048
"""Numbers of a program's rows, where one row is not longer."""


# Sizes that change from step to step: specialised, each kind of number would be compiled anew while serving.
@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,
    rows_ptr,
    delta_ptr,
    weight_ptr,
    eps,
    num_rows,
    stride_rows,
    stride_delta,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Grid (T / ROWS). rows_ptr, delta_ptr, out_ptr [T, SIZE], strides between rows; weight_ptr [SIZE]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (columns < SIZE)
    place = rows_ptr + row * stride_rows + columns
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta_ptr + row * stride_delta + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(rows_ptr.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = values * scale[:, None] * weight
    tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def choose_tile(size: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program for rows of ``size`` numbers.

    A thread has sixteen numbers or more, all its own: were one shared by two threads, one of them could read a
    residual that the other has already written.
    """
    block = next_power_of_two(size)
    rows = max(1, TILE // block)
    return rows, block, max(1, min(16, rows * block // 512))


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm [T, n] of ``rows`` [T, n] in their dtype; ``weight`` [n]."""
    return _launch(rows, None, weight, eps)


def add_rms_norm(rows: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``delta`` [T, n] to ``rows`` [T, n] in place, then return their norm."""
    assert delta.shape == rows.shape, f"{tuple(delta.shape)} is added to {tuple(rows.shape)}"
    assert delta.dtype == rows.dtype, f"{delta.dtype} is added to {rows.dtype}"
    return _launch(rows, delta, weight, eps)


def _launch(rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, size = rows.shape
    assert weight.shape == (size,), f"{tuple(weight.shape)} weights for rows of {size}"
    assert size <= MAX_SIZE, f"rows of {size} numbers; {MAX_SIZE} fit the registers"
    added = rows if delta is None else delta
    for each in (rows, added, weight):
        assert each.stride(-1) == 1, f"strides {each.stride()}: the numbers of a row must lie together"
    out = torch.empty((num_rows, size), dtype=rows.dtype, device=rows.device)
    tile_rows, block, num_warps = choose_tile(size)
    rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
        out,
        rows,
        added,
        weight,
        eps,
        num_rows,
        rows.stride(0),
        added.stride(0),
        SIZE=size,
        ROWS=tile_rows,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        num_warps=num_warps,
    )
    return out


def rms_norm_twin(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula, naively."""
    wide = rows.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(rows.dtype)


def add_rms_norm_twin(
    rows: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `add_rms_norm`: ``rows`` change in place."""
    rows.add_(delta)
    return rms_norm_twin(rows, weight, eps)
