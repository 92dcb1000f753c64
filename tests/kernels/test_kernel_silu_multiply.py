"""silu(gate) * up against the formula and torch's own operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, DTYPES, ROUNDING, nan_filled, random_tensor

from pagedserve.kernels.silu_multiply import silu_multiply, silu_multiply_twin


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (40, 48), (2, 1536), (1, 1025), (2, 3000)])
def test_silu_times_up(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = 3 * random_tensor(shape[0], 2 * shape[1], dtype=dtype)
    before = gate_up.clone()
    with nan_filled():
        found = silu_multiply(gate_up)
    compare(found, silu_multiply_twin(gate_up))
    gate, up = gate_up.chunk(2, dim=-1)
    compare(found, torch.nn.functional.silu(gate) * up)
    assert torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, as it should
def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -0.0, 90.0, 200.0, 1e4]], device=DEVICE)
    found = silu_multiply(torch.cat([gate, torch.ones_like(gate)], dim=1))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate))


def test_rows_apart_and_a_nan_neighbour() -> None:
    wide = random_tensor(6, 100)
    wide[:, 60:] = float("nan")
    wide[2] = float("nan")
    found = silu_multiply(wide[:, :60])
    assert found[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    compare(found[kept], silu_multiply_twin(wide[kept, :60]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(1, 300))
def test_any_shape(num_rows: int, size: int) -> None:
    gate_up = random_tensor(num_rows, 2 * size, seed=size)
    with nan_filled():
        found = silu_multiply(gate_up)
    compare(found, silu_multiply_twin(gate_up))


def test_wrong_shapes_are_caught() -> None:
    with pytest.raises(AssertionError, match="two halves"):
        silu_multiply(random_tensor(2, 5))
    with pytest.raises(AssertionError, match="must lie together"):
        silu_multiply(random_tensor(4, 2).T)
