"""SiLU of the gate times the rest (SwiGLU, Shazeer 2020), for gate and up projections made by one product.

Per token t and column j of n:

    out[t, j] = silu(x[t, j]) * x[t, n + j]        silu(g) = g / (1 + exp(-g))

float32 inside; silu is rounded to the dtype before the product, as two operations of torch would.
"""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.launching import next_power_of_two

TILE = 1024
"""Numbers of a program: of one row, or of several short ones."""
NUM_WARPS = 4


# Sizes that change from step to step: specialised, each kind of number would be compiled anew while serving.
@triton.jit(do_not_specialize=["num_rows"])
def silu_multiply_kernel(
    out_ptr,
    gate_up_ptr,
    num_rows,
    stride_gate_up,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T / ROWS, SIZE / BLOCK). gate_up_ptr [T, 2 * SIZE] with a stride between rows, out_ptr [T, SIZE]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (columns < SIZE)
    place = gate_up_ptr + row * stride_gate_up + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def choose_tile(size: int) -> tuple[int, int]:
    """Rows and columns of a program for rows of ``size`` numbers."""
    block = min(TILE, next_power_of_two(size))
    return TILE // block, block


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, n], for ``gate_up`` [T, 2n], in its dtype."""
    num_rows, width = gate_up.shape
    assert width % 2 == 0, f"{width} columns are not two halves"
    assert gate_up.stride(1) == 1, f"strides {gate_up.stride()}: the numbers of a row must lie together"
    size = width // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    rows, block = choose_tile(size)
    silu_multiply_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(size, block))](
        out,
        gate_up,
        num_rows,
        gate_up.stride(0),
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    return out


def silu_multiply_twin(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula, naively."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    active = (gate / (1 + torch.exp(-gate))).to(gate_up.dtype)
    return (active.float() * up).to(gate_up.dtype)
