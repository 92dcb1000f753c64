"""The device's noise is the sampler's: the same integers for every seed, position and sample index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, nan_filled

from pagedserve.engine.sampling import philox
from pagedserve.kernels.philox import BLOCK, noise_words

LONG = st.integers(-(2**63), 2**63 - 1)


def check(rows: list[tuple[int, int, int]]) -> None:
    seeds, positions, indices = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    with nan_filled():
        found = noise_words(seeds.to(DEVICE), positions.to(DEVICE), indices.to(DEVICE))
    assert torch.equal(found.cpu(), philox.noise_words(seeds, positions, indices))
    assert found.tolist() == [philox.noise_words(*row) for row in rows]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(LONG, st.integers(0, 2**62), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_any_words(rows: list[tuple[int, int, int]]) -> None:
    check(rows)


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_every_size_of_batch(count: int) -> None:
    check([(index * 7919 - 5, index, index % 3) for index in range(count)])


def test_wrong_inputs_are_caught() -> None:
    words = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match=r"torch\.int32 for a seed"):
        noise_words(words, words.int(), words)
    with pytest.raises(AssertionError, match="beside"):
        noise_words(words, words[:2], words)
