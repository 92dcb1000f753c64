"""Philox4x32-10: random numbers as a function of a counter and a key, with no state to keep or lose.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A token's noise is named
by (seed, position, sample index), so it does not depend on the batch, on preemption or on the device.

Every line works alike on Python ints, NumPy int64 arrays and torch int64 tensors of any device: the words are
kept in 0 .. 2**32-1 and no intermediate passes 2**49, so that signed 64-bit arithmetic never overflows.
"""

from typing import TypeVar

import numpy as np
import torch

Word = TypeVar("Word", int, np.ndarray, torch.Tensor)

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF

# The counter's last word: another use of noise at the same position takes another stream.
SAMPLING_STREAM = 0


def multiply_high_low(multiplier: int, word: Word) -> tuple[Word, Word]:
    """The upper and lower 32 bits of multiplier * word, both 32 bits wide, in signed 64-bit arithmetic."""
    low = multiplier * (word & 0xFFFF)
    middle = multiplier * (word >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Four words of 32 random bits for a 128-bit counter and a 64-bit key, least significant words first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = multiply_high_low(MULTIPLIERS[0], c0)
        high1, low1 = multiply_high_low(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def noise_words(seeds: Word, positions: Word, sample_indices: Word) -> Word:
    """One 32-bit word per token to be sampled; all arguments of one kind and shape.

    seeds: signed 64 bits, taken as their two's complement. positions: the index the token will have in its
    sequence, prompt included. sample_indices: 0 .. n-1. The uniform is word / 2**32, in [0, 1): a grid of
    2**-32, which is the finest probability that can be told from zero.
    """
    counter = (
        positions & MASK,
        (positions >> 32) & MASK,
        sample_indices,
        sample_indices * 0 + SAMPLING_STREAM,
    )
    return philox4x32(counter, (seeds & MASK, (seeds >> 32) & MASK))[0]
