"""What the front end measures of requests, from their arrival here; a prompt counts once, whatever its ``n``.

Tokens have the time of the commit that brought them, on the engine's clock, ``time.monotonic_ns``, however late the
event loop reads them.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from pagedserve.engine.outputs import Delta
from pagedserve.engine.server.histograms import (
    PHASE_S,
    SAMPLES,
    TTFT_S,
    HistogramState,
    RecentState,
    one_two_five,
)

MAX_COUNTED_TOKENS = 1_000_000
# The worst of a prompt's endings is the prompt's.
_ENDINGS = ("stop", "length", "abort", "timeout", "error")


def _tokens() -> HistogramState:
    return HistogramState(one_two_five(MAX_COUNTED_TOKENS))


@dataclass(slots=True)
class FrontCountsState:
    """Counted since the start: ``num_accepted`` prompts = their ends by reason + those at work now."""

    num_accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """HTTP answers by path and status."""
    ttft: HistogramState = field(default_factory=lambda: HistogramState(TTFT_S))
    recent_ttft: RecentState = field(default_factory=RecentState)
    e2e: HistogramState = field(default_factory=lambda: HistogramState(PHASE_S))
    prompt_tokens: HistogramState = field(default_factory=_tokens)
    generation_tokens: HistogramState = field(default_factory=_tokens)
    max_generation_tokens: HistogramState = field(default_factory=_tokens)
    params_max_tokens: HistogramState = field(default_factory=_tokens)
    params_n: HistogramState = field(default_factory=lambda: HistogramState(SAMPLES))

    @property
    def num_open(self) -> int:
        """Prompts at work."""
        return self.num_accepted - self.ended.total()


class PromptMeter:
    """One prompt from its arrival to its end. It counts from its acceptance on: what is refused before does not."""

    __slots__ = (
        *("_arrival_ns", "_counts", "_ending", "_has_token", "_is_over", "_last_ns", "_num_open"),
        "num_tokens",
    )

    def __init__(self, counts: FrontCountsState, arrival_ns: int, num_samples: int) -> None:
        self._counts, self._arrival_ns, self._num_open = counts, arrival_ns, num_samples
        self._has_token, self._is_over = False, True
        self._ending, self._last_ns = 0, arrival_ns
        self.num_tokens = [0] * num_samples

    def take(self, delta: Delta) -> bool:
        """A delta of one of its sequences has come; True if it is the prompt's first token."""
        is_first = bool(delta.token_ids) and not self._has_token
        if delta.token_ids:
            self._last_ns = time.monotonic_ns() if delta.time_ns is None else delta.time_ns
        if is_first:
            self._has_token = True
            ttft_s = (self._last_ns - self._arrival_ns) / 1e9
            self._counts.ttft.observe(ttft_s)
            self._counts.recent_ttft.observe(ttft_s)
        self.num_tokens[delta.index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._ending = max(self._ending, _ENDINGS.index(_known(delta.finish_reason)))
            if not self._num_open:
                self.end(_ENDINGS[self._ending])
        return is_first

    def accepted(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Its prompt is tokenised, has its place in the queue and goes to the engine."""
        self._is_over = False
        self._counts.num_accepted += 1
        self._counts.prompt_tokens.observe(num_prompt_tokens)
        self._counts.params_max_tokens.observe(max_tokens)
        self._counts.params_n.observe(len(self.num_tokens))

    def end(self, reason: str) -> None:
        """It has ended, if it was at work; only the first reason counts."""
        if self._is_over:
            return
        self._is_over = True
        counts = self._counts
        counts.ended[_known(reason)] += 1
        if self._has_token:
            counts.e2e.observe((self._last_ns - self._arrival_ns) / 1e9)
            counts.generation_tokens.observe(sum(self.num_tokens))
            counts.max_generation_tokens.observe(max(self.num_tokens))


def _known(reason: str) -> str:
    return reason if reason in _ENDINGS else "abort"
