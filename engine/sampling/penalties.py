"""Penalties for tokens that a sequence has already.

For a token that occurs c times in the output, with logit l:
    repetition r, if it is anywhere in prompt or output: l / r where l > 0, else l * r  (CTRL, arXiv 1909.05858)
    then l - frequency * c - presence * (c > 0)                                         (OpenAI's API)
Prompt tokens count for the repetition penalty only, as in vLLM. All of it is arithmetic on single logits, so no
neighbour in the batch matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedserve.engine.packing import send
from pagedserve.engine.params import SamplingParams

INITIAL_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Penalties:
    """Flat, one entry for each row and distinct token: rows, ids int64; the others float32; all of one length.

    counts: occurrences in the output.
    """

    rows: Tensor
    ids: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply(self, logits: Tensor) -> None:
        """Change logits, float32 [R, V], in place."""
        values = logits[self.rows, self.ids]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        values = values - self.frequency * self.counts - self.presence * (self.counts > 0)
        logits[self.rows, self.ids] = values


class TokenCountsState:
    """The distinct tokens of one sequence and how often each is in its output; constant work per token."""

    __slots__ = ("_counts", "_ids", "_places", "params")

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._places: dict[int, int] = {}
        self._ids = np.zeros(INITIAL_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(INITIAL_CAPACITY, dtype=np.float32)
        if params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(prompt_ids):
                self._place(token_id)

    def append(self, token_id: int) -> None:
        """An output token."""
        place = self._place(token_id)  # first: it may replace the array
        self._counts[place] += 1.0

    @property
    def ids(self) -> np.ndarray:
        """int64 [D], distinct."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [D], in the order of ids; 0 for a token of the prompt alone."""
        return self._counts[: len(self._places)]

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
        return place


def penalties_of(rows: Sequence[int], states: Sequence[TokenCountsState], device: torch.device) -> Penalties:
    """For the batch's ``rows``, whose sequences have these states; at least one."""
    lengths = [len(state.ids) for state in states]

    def spread(name: str) -> np.ndarray:
        values = np.array([getattr(state.params, name) for state in states], dtype=np.float32)
        return np.repeat(values, lengths)

    arrays = (
        np.repeat(np.array(rows, dtype=np.int64), lengths),
        np.concatenate([state.ids for state in states]),
        np.concatenate([state.counts for state in states]),
        spread("repetition_penalty"),
        spread("frequency_penalty"),
        spread("presence_penalty"),
    )
    return Penalties(*send(arrays, device))
