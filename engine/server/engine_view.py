"""A look into a scheduler between two steps: every block's owner and every sequence's progress, no text.

In two halves: `glimpse` copies what changes, while the engine waits; `GlimpseState.view` makes sense of it later.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pagedserve.engine.server.observer import EngineCountsState
from pagedserve.engine.server.tenants import shown_tenant
from pagedserve.policy import RequestState, Scheduler

FREE, CACHED, QUARANTINED, FIRST_OWNED = 0, 1, 2, 3
"""Codes of blocks. An owned block has ``FIRST_OWNED + 2 * request``, and one more if it is shared."""
MOST_WAITING = 64
WAITING, PREEMPTED, PREFILL, RECOMPUTE, DECODE = range(5)
"""Phases of a sequence, for people: the policy knows only computed and known tokens."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One live sequence. ``max_output_tokens`` is where it ends at the latest; tokens of steps in flight count."""

    id: int
    phase: int
    tenant: str
    arrival_ns: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    num_blocks: int
    num_prefix_hit_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """Blocks by what they are; ``shared`` ones are among the owned. Their sum is the pool."""

    owned: int
    shared: int
    quarantined: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """One moment; times are nanoseconds on the engine's clock.

    ``blocks``: int64, the code of each block. ``waiting`` has the first `MOST_WAITING` of ``num_waiting``, the
    preempted ones first, then by arrival. ``totals`` are counts since the start, times among them in seconds.
    ``itl``: the last times between tokens, in seconds, each with how many sequences had it; ``num_itl`` is how
    many such entries there were since the start.
    """

    taken_ns: int
    blocks: np.ndarray
    pool: PoolView
    num_wasted_slots: int
    running: tuple[SequenceView, ...]
    waiting: tuple[SequenceView, ...]
    num_waiting: int
    totals: dict[str, float]
    finished: dict[str, int]
    itl: list[tuple[float, int]]
    num_itl: int


@dataclass(slots=True)
class GlimpseState:
    """What was copied; the scheduler may go on."""

    taken_ns: int
    num_blocks: int
    num_wasted_slots: int
    cached: list[int]
    quarantined: list[int]
    running: list[SequenceView]
    tables: list[list[int]]
    waiting: list[RequestState]
    totals: dict[str, float]
    finished: dict[str, int]
    itl: list[tuple[float, int]]
    num_itl: int

    def view(self) -> EngineView:
        """Costs milliseconds for 100,000 blocks. Waiting sequences that have begun to run since still wait here."""
        blocks, pool = self._blocks()
        # Nobody reads a list of thousands, and a sort of all of them would cost more than the rest together.
        first = heapq.nsmallest(MOST_WAITING, self.waiting, key=lambda s: (not s.num_preemptions, s.intake))
        return EngineView(
            self.taken_ns,
            blocks,
            pool,
            self.num_wasted_slots,
            tuple(self.running),
            tuple(_seen(s, PREEMPTED if s.num_preemptions else WAITING, 0, 0) for s in first),
            len(self.waiting),
            self.totals,
            self.finished,
            self.itl,
            self.num_itl,
        )

    def _blocks(self) -> tuple[np.ndarray, PoolView]:
        codes = np.full(self.num_blocks, FREE, dtype=np.int64)
        codes[self.cached] = CACHED
        codes[self.quarantined] = QUARANTINED
        sizes = [len(table) for table in self.tables]
        held = np.fromiter(chain.from_iterable(self.tables), np.int64, sum(sizes))
        owners = np.repeat(np.array([each.id for each in self.running], dtype=np.int64), sizes)
        # A shared block is its oldest holder's: the last one written stays.
        codes[held[::-1]] = FIRST_OWNED + 2 * owners[::-1]
        num_holders = np.bincount(held, minlength=self.num_blocks)
        shared = num_holders > 1
        codes[shared] += 1
        kinds = np.bincount(np.minimum(codes, FIRST_OWNED), minlength=FIRST_OWNED + 1).tolist()
        return codes, PoolView(
            kinds[FIRST_OWNED], int(shared.sum()), kinds[QUARANTINED], kinds[CACHED], kinds[FREE]
        )


def glimpse(scheduler: Scheduler, counts: EngineCountsState, now_ns: int) -> GlimpseState:
    """Copy what changes: lists of integers, and a few numbers a sequence. Call it between two steps."""
    running = list(scheduler.running.values())
    allocator = scheduler.allocator
    return GlimpseState(
        taken_ns=now_ns,
        num_blocks=scheduler.limits.num_blocks,
        num_wasted_slots=scheduler.num_wasted_slots,
        cached=allocator.cached_blocks(),
        quarantined=allocator.quarantined_blocks(),
        running=[_seen(s, _phase(s), s.num_computed_tokens, len(s.block_table)) for s in running],
        tables=[s.block_table.copy() for s in running],
        waiting=list(scheduler.waiting),
        totals=_totals(counts),
        finished=dict(counts.finished),
        itl=list(counts.recent_itl.values),
        num_itl=counts.recent_itl.num_observed,
    )


def _phase(state: RequestState) -> int:
    if state.group is not None or (state.num_remaining_tokens <= 1 and state.num_output_tokens):
        return DECODE
    return RECOMPUTE if state.num_preemptions else PREFILL


def _seen(state: RequestState, phase: int, num_computed_tokens: int, num_blocks: int) -> SequenceView:
    request = state.request
    return SequenceView(
        state.id,
        phase,
        shown_tenant(request.tenant),
        request.arrival_ns,
        request.num_prompt_tokens,
        num_computed_tokens,
        state.num_output_tokens,
        state.limit,
        num_blocks,
        state.num_prefix_hit_tokens,
        state.num_preemptions,
    )


def _totals(counts: EngineCountsState) -> dict[str, float]:
    return {
        "steps": counts.num_steps,
        "prompt_tokens": counts.num_prompt_tokens,
        "output_tokens": counts.num_generated_tokens,
        "queried_tokens": counts.num_prefix_queried_tokens,
        "hit_tokens": counts.num_prefix_hit_tokens,
        "preemptions": counts.num_preemptions,
        "recomputed_tokens": counts.num_recomputed_tokens,
        "blocks_swapped_out": counts.num_blocks_swapped_out,
        "blocks_swapped_in": counts.num_blocks_swapped_in,
        "discarded_tokens": counts.num_discarded_tokens,
        "gap_s": counts.device.gap.total,
        "gaps": counts.device.gap.count,
        "busy_s": counts.device.busy_s,
    }
