"""Counts what an engine does, in its thread, from the calls that a `Recorder` gets.

The work follows what changes in a step, never what runs: the tokens of a decode round that goes on are one
addition. All times are the engine's own (the ``now_ns`` of its verbs), so a token's time does not depend on
how fast anybody reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedserve.engine.loop import LoopObserver
from pagedserve.engine.server.device_clock import DeviceClockState
from pagedserve.engine.server.histograms import (
    ITERATION_TOKENS,
    ITL_S,
    PHASE_S,
    PREEMPTIONS,
    HistogramState,
    RecentState,
    one_two_five,
)
from pagedserve.policy import Finished, Outcome, Request, RequestState, Scheduler, StepPlan

MAX_PROMPT_TOKENS = 1_000_000


@dataclass(slots=True)
class EngineCountsState:
    """What was counted since the start; histograms of times are in seconds."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Of requests whose first token came."""
    num_cached_prompt_tokens: int = 0
    """Of those, found in the prefix cache."""
    num_computed_prompt_tokens: int = 0
    """Of those, the others."""
    num_generated_tokens: int = 0
    num_discarded_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Sequences ended, by reason; an ``n`` of several is several of them."""
    iteration_tokens: HistogramState = field(default_factory=lambda: HistogramState(ITERATION_TOKENS))
    itl: HistogramState = field(default_factory=lambda: HistogramState(ITL_S))
    tpot: HistogramState = field(default_factory=lambda: HistogramState(ITL_S))
    queue: HistogramState = field(default_factory=lambda: HistogramState(PHASE_S))
    prefill: HistogramState = field(default_factory=lambda: HistogramState(PHASE_S))
    decode: HistogramState = field(default_factory=lambda: HistogramState(PHASE_S))
    inference: HistogramState = field(default_factory=lambda: HistogramState(PHASE_S))
    preemptions: HistogramState = field(default_factory=lambda: HistogramState(PREEMPTIONS))
    prefill_computed: HistogramState = field(
        default_factory=lambda: HistogramState(one_two_five(MAX_PROMPT_TOKENS))
    )
    """Prompt tokens of a sequence that were not in the prefix cache."""
    device: DeviceClockState = field(default_factory=DeviceClockState)
    recent_itl: RecentState = field(default_factory=RecentState)


@dataclass(slots=True)
class _SequenceState:
    """One live sequence; ``last_ns`` is its last token's time, as long as it is not in the decode group."""

    state: RequestState
    queued_ns: int
    first_ns: int | None = None
    last_ns: int | None = None

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens that were not in the prefix cache at its first admission."""
        return self.state.request.num_prompt_tokens - self.state.num_prefix_hit_tokens


class EngineObserver:
    """Takes a `Recorder`'s calls, passes them on to one, and counts.

    Definitions are vLLM's: queue = first scheduled - queued, prefill = first token - first scheduled, decode =
    last - first token, inference = last token - first scheduled, TPOT = decode / (tokens - 1); a sequence
    counts once it has ended with a token. ITL is of every token but a sequence's first.
    """

    def __init__(self, scheduler: Scheduler, recorder: LoopObserver) -> None:
        self.counts = EngineCountsState()
        self._scheduler = scheduler
        self._inner = recorder
        self._live: dict[int, _SequenceState] = {}
        self._in_flight: dict[int, StepPlan] = {}
        # Members of the decode group that have not done a round in it; for the others the last round counts.
        self._newcomers: set[int] = set()
        self._round_ns = 0
        self._num_discarded = 0
        self._device = self.counts.device

    def added(self, state: RequestState, due_ns: int, now_ns: int) -> None:
        """See `Recorder.added`."""
        self._inner.added(state, due_ns, now_ns)
        self._live[state.id] = _SequenceState(state, now_ns)
        self._device.has_work(now_ns)

    def refused(self, request: Request, due_ns: int, now_ns: int, error: str) -> None:
        """See `Recorder.refused`."""
        self._inner.refused(request, due_ns, now_ns, error)
        self.counts.num_refused += 1

    def aborted(self, request: int, now_ns: int, reason: str = "abort") -> None:
        """See `Recorder.aborted`."""
        self._inner.aborted(request, now_ns, reason)
        if self._live.pop(request, None) is not None:
            self._newcomers.discard(request)
            self.counts.finished[reason] += 1
        if not self._scheduler.has_work:
            self._device.has_none()

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """See `Recorder.scheduled`."""
        self._inner.scheduled(plan, now_ns)
        self.counts.num_preemptions = self._scheduler.num_preemptions
        if plan.step is None:
            self._device.has_none()
            return
        self._device.has_work(now_ns)
        self._in_flight[plan.step] = plan
        counts = self.counts
        counts.num_steps += 1
        counts.iteration_tokens.observe(plan.shape.num_tokens)
        counts.num_recomputed_tokens += plan.num_recomputed_tokens
        counts.num_blocks_swapped_out += plan.shape.num_blocks_swapped_out
        counts.num_blocks_swapped_in += plan.shape.num_blocks_swapped_in
        if self._scheduler.policy.enable_prefix_caching:
            for request in plan.new_requests:
                live = self._live.get(request.id)
                counts.num_prefix_queried_tokens += request.num_prompt_tokens
                counts.num_prefix_hit_tokens += live.state.num_prefix_hit_tokens if live else 0

    def launched(self, now_ns: int) -> None:
        """See `Recorder.launched`."""
        self._inner.launched(now_ns)
        self._device.launched(now_ns)

    def committed(
        self, step: int, outcomes: Sequence[Outcome], finished: list[Finished], now_ns: int
    ) -> None:
        """See `Recorder.committed`."""
        self._inner.committed(step, outcomes, finished, now_ns)
        self._device.committed(now_ns, self._scheduler.has_work)
        plan = self._in_flight.pop(step)
        failed = {o.request for o in outcomes if o.stop_reason is not None and not o.num_tokens}
        self._move(plan)
        discarded = self._scheduler.num_discarded_tokens - self._num_discarded
        self._num_discarded += discarded
        self.counts.num_discarded_tokens = self._num_discarded
        for chunk in plan.chunks:
            if chunk.samples and chunk.request not in self._live:
                discarded -= 1  # a chunk's, not the decode group's
            elif chunk.samples and chunk.request not in failed:
                self._token(self._live[chunk.request], now_ns)
        if plan.decodes:
            self._round(plan, discarded, failed, now_ns)
        for end in finished:
            self._finished(end, now_ns)

    def _move(self, plan: StepPlan) -> None:
        """Follow who joined and left the decode group with this step."""
        for request in plan.left:
            if request in self._newcomers:
                self._newcomers.discard(request)
            elif request in self._live:
                self._live[request].last_ns = self._round_ns
        self._newcomers.update(request for request in plan.joined if request in self._live)

    def _round(self, plan: StepPlan, discarded: int, failed: set[int], now_ns: int) -> None:
        """Every member of the group got a token, but those that had ended or failed."""
        first = [request for request in self._newcomers if request not in failed]
        staying = plan.shape.num_decodes - len(self._newcomers) - discarded
        staying -= len(failed.intersection(plan.decodes) - self._newcomers)
        for request in first:
            self._token(self._live[request], now_ns)
            self._live[request].last_ns = None
        if staying > 0:
            self._token_gap((now_ns - self._round_ns) / 1e9, staying)
            self.counts.num_generated_tokens += staying
        self._newcomers.clear()
        self._round_ns = now_ns

    def _token(self, live: _SequenceState, now_ns: int) -> None:
        """A token of one sequence whose last one was not in the round before."""
        counts = self.counts
        counts.num_generated_tokens += 1
        if live.first_ns is None:
            live.first_ns = now_ns
            counts.num_prompt_tokens += live.state.request.num_prompt_tokens
            counts.num_cached_prompt_tokens += live.state.num_prefix_hit_tokens
            counts.num_computed_prompt_tokens += live.num_computed_prompt_tokens
        elif live.last_ns is not None:
            self._token_gap((now_ns - live.last_ns) / 1e9)
        live.last_ns = now_ns

    def _token_gap(self, gap_s: float, times: int = 1) -> None:
        """Time between two tokens of a sequence."""
        self.counts.itl.observe(gap_s, times)
        self.counts.recent_itl.observe(gap_s, times)

    def _finished(self, end: Finished, now_ns: int) -> None:
        live, counts = self._live.pop(end.request), self.counts
        self._newcomers.discard(end.request)
        counts.finished[end.reason] += 1
        scheduled_ns = live.state.first_schedule_ns
        counts.preemptions.observe(live.state.num_preemptions)
        if live.first_ns is None or scheduled_ns is None or end.reason == "error":
            return
        # A sequence that ends by itself ends with a token, at this very commit.
        counts.prefill_computed.observe(
            live.state.request.num_prompt_tokens - live.state.num_prefix_hit_tokens
        )
        counts.queue.observe((scheduled_ns - live.queued_ns) / 1e9)
        counts.prefill.observe((live.first_ns - scheduled_ns) / 1e9)
        counts.decode.observe((now_ns - live.first_ns) / 1e9)
        counts.inference.observe((now_ns - scheduled_ns) / 1e9)
        if end.num_output_tokens > 1:
            counts.tpot.observe((now_ns - live.first_ns) / 1e9 / (end.num_output_tokens - 1))
