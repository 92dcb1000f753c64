"""RMSNorm, alone and behind an addition, against the formula and torch's own operation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, DTYPES, ROUNDING, nan_filled, random_tensor

from pagedserve.kernels.rms_norm import (
    MAX_SIZE,
    add_rms_norm,
    add_rms_norm_twin,
    choose_tile,
    rms_norm,
    rms_norm_twin,
)

SHAPES = [(1, 1), (3, 7), (1, 576), (5, 577), (33, 64), (2, 4096), (130, 17), (1, 5000)]


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    if expected.dtype == torch.float16 and expected.numel() > 50:
        assert (found == expected).float().mean() > 0.98, "it is rounded elsewhere than torch rounds"
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[1], dtype=dtype, seed=1)
    before = rows.clone()
    with nan_filled():
        found = rms_norm(rows, weight, 1e-5)
    compare(found, rms_norm_twin(rows, weight, 1e-5))
    compare(found, torch.nn.functional.rms_norm(rows, (shape[1],), weight, 1e-5))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_and_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, delta = random_tensor(shape[1], dtype=dtype, seed=1), random_tensor(*shape, dtype=dtype, seed=2)
    rows = random_tensor(*shape, dtype=dtype)
    expected_rows, kept = rows.clone(), delta.clone()
    expected = add_rms_norm_twin(expected_rows, delta, weight, 1e-6)
    with nan_filled():
        found = add_rms_norm(rows, delta, weight, 1e-6)
    compare(rows, expected_rows)
    compare(found, expected)
    assert torch.equal(delta, kept)
    if dtype != torch.bfloat16:
        assert torch.equal(rows, expected_rows), "an addition is rounded as torch rounds it"


def test_rows_apart_and_what_lies_between() -> None:
    """Rows of a wider matrix: the columns beside them are neither read nor written."""
    wide, wide_delta = random_tensor(9, 40), random_tensor(9, 50, seed=1)
    wide[:, 33:], wide_delta[:, 33:] = float("nan"), float("nan")
    weight = random_tensor(33, seed=2)
    expected_rows = wide[:, :33].clone()
    expected = add_rms_norm_twin(expected_rows, wide_delta[:, :33], weight, 1e-6)
    compare(add_rms_norm(wide[:, :33], wide_delta[:, :33], weight, 1e-6), expected)
    compare(wide[:, :33], expected_rows)
    assert wide[:, 33:].isnan().all()


def test_a_row_is_the_same_bits_among_any_number_of_rows() -> None:
    rows, weight = random_tensor(70, 96), random_tensor(96, seed=1)
    whole = rms_norm(rows, weight, 1e-5)
    for row in (0, 20, 69):
        assert torch.equal(rms_norm(rows[row : row + 1], weight, 1e-5)[0], whole[row])


def test_a_neighbour_that_is_nan_changes_nothing() -> None:
    rows, weight = random_tensor(8, 96), random_tensor(96, seed=1)
    whole = rms_norm(rows, weight, 1e-5)
    rows[3] = float("nan")
    found = rms_norm(rows, weight, 1e-5)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6, 7]], whole[[0, 1, 2, 4, 5, 6, 7]])


def test_zeros_stay_zeros_and_no_rows_are_fine() -> None:
    weight = random_tensor(10)
    assert torch.equal(rms_norm(torch.zeros(2, 10, device=DEVICE), weight, 1e-5).cpu(), torch.zeros(2, 10))
    assert rms_norm(torch.zeros(0, 10, device=DEVICE), weight, 1e-5).shape == (0, 10)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 700), st.sampled_from([1e-6, 1e-5, 1.0]))
def test_any_shape(num_rows: int, size: int, eps: float) -> None:
    rows, weight = random_tensor(num_rows, size, seed=size), random_tensor(size, seed=num_rows)
    with nan_filled():
        found = rms_norm(rows, weight, eps)
    compare(found, rms_norm_twin(rows, weight, eps))


@pytest.mark.parametrize("size", [1, 576, 1024, 4096, 8192, MAX_SIZE])
def test_no_number_has_two_threads(size: int) -> None:
    """Two would race on the residual that is changed in place."""
    rows, block, num_warps = choose_tile(size)
    assert block >= size
    assert rows * block >= 32 * num_warps


def test_wrong_shapes_are_caught() -> None:
    with pytest.raises(AssertionError, match="weights for rows of 4"):
        rms_norm(random_tensor(2, 4), random_tensor(5), 1e-5)
    with pytest.raises(AssertionError, match="is added to"):
        add_rms_norm(random_tensor(2, 4), random_tensor(3, 4), random_tensor(4), 1e-5)
    with pytest.raises(AssertionError, match="must lie together"):
        rms_norm(random_tensor(4, 2).T, random_tensor(4), 1e-5)
