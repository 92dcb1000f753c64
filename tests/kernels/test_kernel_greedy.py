"""The largest logit of a row and the lowest id that has it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, nan_filled, random_tensor

from pagedserve.kernels.greedy import greedy_tokens, greedy_tokens_twin

odd_numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, -math.inf])


def check(logits: torch.Tensor, chunk: int = 16) -> None:
    before = logits.clone()
    with nan_filled():
        tokens, peaks = greedy_tokens(logits, chunk)
    expected_tokens, expected_peaks = greedy_tokens_twin(logits)
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(peaks, expected_peaks, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70).flatmap(
        lambda size: st.lists(st.lists(odd_numbers, min_size=size, max_size=size), min_size=1, max_size=4)
    )
)
def test_rows_full_of_ties(rows: list[list[float]]) -> None:
    check(torch.tensor(rows, device=DEVICE))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 48, 1000])
def test_any_size_and_every_place(size: int) -> None:
    check(random_tensor(5, size))
    for place in {0, size // 2, size - 1}:
        logits = random_tensor(1, size)
        logits[0, place] = 50.0
        assert greedy_tokens(logits, 16)[0].tolist() == [place]


def test_the_zeros_are_equal() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0], [0.0, -0.0, -1.0]], device=DEVICE)
    assert greedy_tokens(logits, 16)[0].tolist() == [1, 0]


def test_a_vocabulary_as_launched() -> None:
    logits = random_tensor(2, 49_152).bfloat16().float()
    check(logits, 4096)
    assert torch.equal(greedy_tokens(logits)[0], logits.argmax(-1))


def test_broken_rows_say_so_and_stay_in_range() -> None:
    """A NaN anywhere, an infinity, and a row without any token; their neighbours are as ever."""
    logits = random_tensor(5, 40)
    logits[0, 33], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 20] = -torch.tensor(math.nan)
    tokens, peaks = greedy_tokens(logits, 16)
    assert tokens.tolist()[:4] == [33, 7, 0, 20]
    assert peaks[0].isnan()
    assert peaks[1:3].tolist() == [math.inf, -math.inf]
    assert peaks[3].isnan()
    check(logits[4:])


def test_padded_columns_are_never_chosen() -> None:
    padded = random_tensor(3, 50)
    padded[:, 37:] = 1e9
    check(padded[:, :37])


def test_wrong_inputs_are_caught() -> None:
    with pytest.raises(AssertionError, match=r"logits are torch\.bfloat16"):
        greedy_tokens(random_tensor(1, 4, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="must lie together"):
        greedy_tokens(random_tensor(4, 3).T)
