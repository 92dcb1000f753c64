"""Prompts as token ids for traces that have none: equal prefixes of the trace are equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pagedserve.traces.trace import Trace


class TracePrompts(Sequence[list[int]]):
    """The token ids of every request's prompt, made when asked for.

    Token ``j`` of the block with id ``b`` is a hash of (seed, b, j) modulo the vocabulary, so two prompts
    share tokens exactly as far as the trace says they share blocks. Without block ids every prompt is its
    own. ``vocab_size`` is the number of ids that may be used; any of them may appear.
    """

    def __init__(self, trace: Trace, vocab_size: int, seed: int = 0) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        self._trace = trace
        self._vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self._trace)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        count, blocks = int(self._trace.num_prompt_tokens[index]), self._trace.blocks
        if blocks is None:
            owner = np.full(count, index, dtype=np.uint64)
            place = np.arange(count, dtype=np.uint64)
        else:
            owner = np.repeat(blocks.of(index), blocks.block_size)[:count].astype(np.uint64)
            place = np.arange(count, dtype=np.uint64) % np.uint64(blocks.block_size)
        mixed = _scrambled(_scrambled(np.uint64(self.seed % 2**64) ^ _scrambled(owner)) ^ place)
        return (mixed % np.uint64(self._vocab_size)).astype(np.int64).tolist()


def _scrambled(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters near numbers."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
