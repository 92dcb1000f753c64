"""Ids of prompt blocks in a trace: which prompts share a prefix, as a ragged array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedserve.traces.report import TraceError

IntArray = npt.NDArray[np.int64]
MAX_BLOCK_SIZE = 999_999_999


def frozen_ints(name: str, values: npt.ArrayLike) -> IntArray:
    """A read-only one-dimensional int64 array with these values; floats, booleans and strings are refused."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TraceError(
            f"{name} must be a one-dimensional array of integers, not {array.dtype} {array.shape}"
        )
    if array.dtype == np.uint64 and array.max(initial=np.uint64(0)) > np.uint64(2**63 - 1):
        raise TraceError(f"{name} holds {array.max()}, which does not fit a signed 64-bit integer")
    if array.dtype == np.int64 and not array.flags.writeable:
        return array
    array = np.array(array, dtype=np.int64)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """One id for every ``block_size`` tokens of every prompt, the partial last block included.

    Request i has ``ids[offsets[i]:offsets[i + 1]]``, that is ceil(num_prompt_tokens / block_size) ids of at
    least 0. An id fixes its whole prefix: equal ids mean equal tokens from the prompt's start to the end of
    the shorter of the two blocks. So an id always has the same predecessor; `broken_chains` finds where not.
    """

    block_size: int
    ids: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozen_ints("block ids", self.ids))
        object.__setattr__(self, "offsets", frozen_ints("block offsets", self.offsets))
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise TraceError(f"block_size must be 1..{MAX_BLOCK_SIZE} tokens, not {self.block_size}")
        ends = self.offsets
        if len(ends) == 0 or ends[0] != 0 or ends[-1] != len(self.ids) or bool(np.any(ends[1:] < ends[:-1])):
            raise TraceError(f"block offsets must rise from 0 to the number of ids, {len(self.ids)}")
        if self.ids.min(initial=0) < 0:
            raise TraceError(f"block ids must be at least 0, but one is {self.ids.min()}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> IntArray:
        """Blocks of each request."""
        return np.diff(self.offsets)

    def of(self, index: int) -> IntArray:
        """The ids of one request, a read-only view."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, index: IntArray, counts: IntArray | None = None) -> BlockIds:
        """The requests of an integer index, each cut to its first ``counts`` blocks if given."""
        counts = self.counts[index] if counts is None else counts
        offsets = np.concatenate(([0], np.cumsum(counts)))
        shift = np.repeat(self.offsets[:-1][index] - offsets[:-1], counts)
        return BlockIds(self.block_size, self.ids[np.arange(offsets[-1]) + shift], offsets)

    def check_covers(self, num_prompt_tokens: IntArray) -> None:
        """Raise `TraceError` unless every prompt has ceil(tokens / block_size) ids."""
        if len(self) != len(num_prompt_tokens):
            raise TraceError(
                f"block ids are given for {len(self)} requests, but there are {len(num_prompt_tokens)}"
            )
        expected = -(-num_prompt_tokens // self.block_size)
        wrong = np.flatnonzero(self.counts != expected)
        if wrong.size:
            index = int(wrong[0])
            raise TraceError(
                f"request at index {index} has {self.counts[index]} block ids, but its "
                f"{num_prompt_tokens[index]} prompt tokens fill {expected[index]} blocks of {self.block_size}"
            )

    def broken_chains(self) -> IntArray:
        """Positions in ``ids`` whose predecessor differs from the one at the id's first occurrence."""
        predecessor = np.concatenate(([-1], self.ids[:-1]))
        starts = self.offsets[:-1][self.counts > 0]
        predecessor[starts] = -1
        _, first, inverse = np.unique(self.ids, return_index=True, return_inverse=True)
        return np.flatnonzero(predecessor != predecessor[first][inverse]).astype(np.int64)
