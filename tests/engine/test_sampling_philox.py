"""Philox against the published vectors, a textbook twin, and itself on every kind of integer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from pagedserve.engine.sampling.philox import (
    MULTIPLIERS,
    ROUNDS,
    WEYL,
    multiply_high_low,
    noise_words,
    philox4x32,
)

# Random123's tests/kat_vectors, "philox4x32 10": counter, key, output. The third is the digits of pi.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

words = st.integers(0, 2**32 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)


def textbook_philox(counter, key):
    """The paper's own formulation, with 64-bit products, on Python ints."""
    c0, c1, c2, c3 = counter
    for step in range(ROUNDS):
        k0, k1 = ((key[i] + step * WEYL[i]) % 2**32 for i in range(2))
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 % 2**32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 % 2**32,
        )
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers_on_every_kind_of_integer(counter, key, output):
    assert philox4x32(counter, key) == output
    assert textbook_philox(counter, key) == output
    c0, c1, c2, c3, k0, k1 = (np.array([word], dtype=np.int64) for word in (*counter, *key))
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == output
    t0, t1, t2, t3, q0, q1 = (torch.tensor([word]) for word in (*counter, *key))
    assert tuple(int(word[0]) for word in philox4x32((t0, t1, t2, t3), (q0, q1))) == output


@settings(deadline=None)
@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_split_multiplication_equals_the_textbook(counter, key):
    assert philox4x32(counter, key) == textbook_philox(counter, key)


@settings(deadline=None)
@given(st.sampled_from(MULTIPLIERS), words)
def test_no_intermediate_leaves_signed_64_bits(multiplier, word):
    high, low = multiply_high_low(multiplier, torch.tensor([word]))
    assert (int(high) << 32 | int(low)) == multiplier * word


@settings(deadline=None)
@given(st.lists(st.tuples(seeds, st.integers(0, 2**40), st.integers(0, 2**14)), min_size=1, max_size=8))
def test_noise_is_the_same_alone_and_in_arrays(rows):
    alone = [noise_words(*row) for row in rows]
    columns = np.array(rows, dtype=np.int64).T
    assert noise_words(*columns).tolist() == alone
    assert noise_words(*map(torch.from_numpy, columns.copy())).tolist() == alone
    assert all(0 <= word < 2**32 for word in alone)


def test_every_part_of_the_name_matters():
    names = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1)]
    assert len({noise_words(*name) for name in names}) == len(names)


def test_neighbouring_names_are_uniform_and_independent():
    """Chi-squared on an 8 by 8 grid of (this, next) for neighbours in position, sample and seed."""
    count = 65_536
    steps = np.arange(count)
    zeros = np.zeros(count, dtype=np.int64)
    for name in ((zeros, steps, zeros), (zeros, zeros, steps), (steps, zeros, zeros)):
        eighths = noise_words(*name) >> 29
        cells = np.bincount(eighths[:-1] * 8 + eighths[1:], minlength=64)
        assert chisquare(cells).pvalue > 1e-3
