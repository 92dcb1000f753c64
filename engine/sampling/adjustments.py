"""What requests may ask to be done to their logits before a token is chosen.

In vLLM's order: tokens that a grammar or `allowed_token_ids` excludes, and the ends that `min_tokens`
suppresses, become -inf; then `logit_bias` is added; then the penalties. A row's neighbours never matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from pagedserve.engine.packing import send
from pagedserve.engine.params import SamplingParams, check_token_ids
from pagedserve.engine.sampling.grammar import WORD_BITS, GrammarState, num_words
from pagedserve.engine.sampling.groups import row_groups
from pagedserve.engine.sampling.penalties import Penalties, TokenCountsState, penalties_of


@dataclass(frozen=True, slots=True)
class Adjustments:
    """One step's changes, on the device; None for none.

    masks: (rows int64 [M], words int32 [M, W]); bit i of word w allows token 32 w + i.
    suppressed: (rows, ids), int64, flat and of one length. bias: (rows, ids, values float32), likewise.
    failures: by row, why its grammar allows nothing any more.
    """

    masks: tuple[Tensor, Tensor] | None = None
    suppressed: tuple[Tensor, Tensor] | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    penalties: Penalties | None = None
    failures: dict[int, str] = field(default_factory=dict)

    def apply(self, logits: Tensor) -> None:
        """Change logits, float32 [R, V], in place."""
        if self.masks is not None:
            _mask(logits, *self.masks)
        if self.suppressed is not None:
            # An assigned number would be copied to a GPU, and waited for.
            logits.index_put_(self.suppressed, logits.new_full((1,), -inf))
        if self.bias is not None:
            rows, ids, values = self.bias
            logits[rows, ids] += values
        if self.penalties is not None:
            self.penalties.apply(logits)


def _mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    for part in row_groups(0, len(rows), logits):
        forbidden = ((words[part].unsqueeze(-1) >> bits) & 1) == 0
        chosen = rows[part]
        forbidden = forbidden.flatten(1)[:, : logits.shape[1]]
        logits[chosen] = logits[chosen].masked_fill(forbidden, -inf)


@dataclass(slots=True)
class _RequestState:
    """What one request asks, beyond what its packed row says."""

    first_stoppable: int
    suppressed_ids: tuple[int, ...] = ()
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    counts: TokenCountsState | None = None
    allowed: np.ndarray | None = None
    grammar: GrammarState | None = None


class AdjustmentTable:
    """The requests that ask for any of it, on the host. Work and memory are for those alone."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._requests: dict[int, _RequestState] = {}
        self.told_by_tokens: set[int] = set()
        """Requests whose changes follow from all of their output: those with a grammar or with penalties."""

    def add(
        self,
        request: int,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        first_stoppable: int,
        suppressed_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        """Take in a request. ``suppressed_ids`` must not be chosen before position ``first_stoppable``.

        ``grammar`` is the request's own; whoever has it tells it of the tokens. Raises ValueError for an id
        outside the vocabulary.
        """
        check_token_ids("suppressed_ids", suppressed_ids, self.vocab_size)
        state = _RequestState(first_stoppable, tuple(suppressed_ids) if params.min_tokens else ())
        state.bias_ids = tuple(token_id for token_id, _ in params.bias_pairs)
        state.bias_values = tuple(value for _, value in params.bias_pairs)
        if params.has_penalties:
            state.counts = TokenCountsState(params, prompt_ids)
        if params.allowed_token_ids is not None:
            state.allowed = _words_of(params.allowed_token_ids, self.vocab_size)
        state.grammar = grammar
        if grammar is not None or state.counts is not None:
            self.told_by_tokens.add(request)
        if state.suppressed_ids or state.bias_ids or state.counts or grammar or state.allowed is not None:
            self._requests[request] = state

    def remove(self, request: int) -> None:
        """Forget a request, if it was taken in."""
        self._requests.pop(request, None)
        self.told_by_tokens.discard(request)

    def append(self, request: int, token_id: int) -> None:
        """A request's output grows."""
        state = self._requests.get(request)
        if state is not None and state.counts is not None:
            state.counts.append(token_id)

    def select(self, requests: Sequence[int], positions: Sequence[int] | np.ndarray) -> Adjustments | None:
        """For the batch whose rows belong to ``requests``; see `SamplingRows.select`."""
        if not self._requests:
            return None
        found = [
            (row, state, positions[row])
            for row, request in enumerate(requests)
            if (state := self._requests.get(request)) is not None
        ]
        if not found:
            return None
        masks, failures = self._masks([(row, state) for row, state, _ in found])
        suppressed = [
            (row, token_id)
            for row, state, position in found
            if position < state.first_stoppable
            for token_id in state.suppressed_ids
        ]
        counted = [(row, state.counts) for row, state, _ in found if state.counts and len(state.counts.ids)]
        return Adjustments(
            masks=masks,
            suppressed=self._pairs(suppressed) if suppressed else None,
            bias=self._bias(found),
            penalties=penalties_of(
                [row for row, _ in counted], [counts for _, counts in counted], self.device
            )
            if counted
            else None,
            failures=failures,
        )

    def _bias(self, found: list[tuple[int, _RequestState, int]]) -> tuple[Tensor, Tensor, Tensor] | None:
        biased = [(row, token_id) for row, state, _ in found for token_id in state.bias_ids]
        if not biased:
            return None
        values = np.array([value for _, state, _ in found for value in state.bias_values], dtype=np.float32)
        rows, ids, added = send([*np.array(biased, dtype=np.int64).T, values], self.device)
        return rows, ids, added

    def _masks(
        self, found: list[tuple[int, _RequestState]]
    ) -> tuple[tuple[Tensor, Tensor] | None, dict[int, str]]:
        masked = [(row, state) for row, state in found if state.grammar or state.allowed is not None]
        if not masked:
            return None, {}
        words = np.zeros((len(masked), num_words(self.vocab_size)), dtype=np.int32)
        failures: dict[int, str] = {}
        for own, (row, state) in zip(words, masked, strict=True):
            failure = state.grammar.fill(own) if state.grammar else None
            if failure is not None:
                failures[row] = failure
            if state.allowed is not None:
                own[:] = own & state.allowed if state.grammar else state.allowed
        rows, sent = send([np.array([row for row, _ in masked], dtype=np.int64), words], self.device)
        return (rows, sent), failures

    def _pairs(self, entries: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows, ids = send([*np.array(entries, dtype=np.int64).T], self.device)
        return rows, ids


def _words_of(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
