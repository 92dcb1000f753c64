"""The step being composed: the verbs a batching rule has, each checked against budget and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagedserve.policy.budget import StepBudgetState
from pagedserve.policy.errors import IllegalPlan
from pagedserve.policy.plan import PrefillChunk
from pagedserve.policy.request import Request, RequestState, Status

if TYPE_CHECKING:
    from pagedserve.policy.scheduler import Scheduler


class Step:
    """One step under composition. Order of effects is the order of calls; preemptions undo earlier ones."""

    def __init__(self, scheduler: Scheduler, now_ns: int) -> None:
        self._scheduler = scheduler
        self._allocator = scheduler.allocator
        self.now_ns = now_ns
        self.number = scheduler.next_step
        limits = scheduler.limits
        self.budget = StepBudgetState(
            limits.max_num_batched_tokens, limits.max_num_seqs - len(scheduler.running), scheduler.allocator
        )
        self.chunks: dict[int, PrefillChunk] = {}
        self.new_requests: dict[int, Request] = {}
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.preempted: list[int] = []
        self.decodes = False
        self.wake_ns: int | None = None
        self.num_recomputed_tokens = 0
        self.num_prefix_hit_tokens = 0

    # What a rule may look at.

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, preempted ones included."""
        return len(self._scheduler.waiting)

    @property
    def num_chunks(self) -> int:
        """Prefill chunks chosen so far."""
        return len(self.chunks)

    @property
    def running(self) -> Iterator[RequestState]:
        """Requests that hold a seat, in admission order."""
        return iter(self._scheduler.running.values())

    def prefilling(self) -> list[RequestState]:
        """Running requests with known tokens left to compute and no chunk in this step, in admission order."""
        return [s for s in self._scheduler.prefilling.values() if s.id not in self.chunks]

    def waiting(self) -> list[RequestState]:
        """Waiting requests in admission order; costs a sort."""
        return self._scheduler.waiting.in_order(self.now_ns)

    def next_waiting(self) -> RequestState | None:
        """The request to be admitted next, or None."""
        return self._scheduler.waiting.first(self.now_ns)

    # What a rule may do.

    def decode(self) -> None:
        """Run the decode group: one token for each member, preempting where blocks run out."""
        scheduler, group = self._scheduler, self._scheduler.group
        needy = group.pop_needing_block()
        if scheduler.stalled:
            needy = sorted([*needy, *scheduler.stalled.values()], key=lambda s: s.admission)
        for state in needy:
            if state.status is not Status.RUNNING:
                continue
            blocks = self._obtain(state, state.num_computed_tokens + 1)
            if blocks is None:
                if state.group is not None:
                    group.leave(state)
                    scheduler.stalled[state.id] = state
            elif state.group is not None:
                group.grown(state)
            else:
                del scheduler.stalled[state.id]
                group.join(state, self.number)
        self.budget.take(scheduler.batching, len(group) if not self.decodes else 0)
        self.decodes = self.decodes or len(group) > 0

    def continue_prefills(self) -> None:
        """Go on with running requests' known tokens, oldest first, as far as the token budget reaches."""
        for state in self.prefilling():
            if not self.budget.num_tokens:
                break
            if state.status is Status.RUNNING:
                self.chunk(state)

    def chunk(self, state: RequestState, num_tokens: int | None = None) -> int:
        """Compute up to ``num_tokens`` (default: all) known tokens of a running request.

        Returns the tokens scheduled: fewer if the budget ends, 0 if no blocks could be had.
        """
        wanted = state.num_remaining_tokens if num_tokens is None else num_tokens
        if state.id in self.chunks or state.id not in self._scheduler.prefilling or wanted < 1:
            raise IllegalPlan(
                f"{type(self._scheduler.batching).__name__} asked for {wanted} tokens of request {state.id}, "
                f"which has {state.num_remaining_tokens} to compute, is {state.status.value}"
                + (" and has a chunk in this step already" if state.id in self.chunks else "")
            )
        wanted = min(wanted, state.num_remaining_tokens, self.budget.num_tokens)
        if wanted < 1 or self._obtain(state, state.num_computed_tokens + wanted) is None:
            return 0
        self._assign(state, wanted)
        return wanted

    def admit_in_order(self, max_requests: int | None = None, whole: bool = False) -> int:
        """Admit waiting requests in admission order until one does not fit; return how many.

        ``whole``: a prompt that does not fit the remaining token budget waits for the next step, unless it
        is longer than the budget of any step.
        """
        admitted = 0
        while max_requests is None or admitted < max_requests:
            state = self.next_waiting()
            if state is None or not self.admit(state, whole=whole):
                break
            admitted += 1
        return admitted

    def admit(self, state: RequestState, num_tokens: int | None = None, whole: bool = False) -> int:
        """Give a waiting request a seat and its first chunk; return the tokens scheduled, 0 if it must wait.

        Nothing is admitted without a seat, a token and blocks, nor in a step that preempted: what was just
        freed belongs to those who needed it. Blocks must suffice for all known tokens
        (``scheduler_reserve_full_isl``) or for the first chunk, and leave the watermark when others run.
        """
        scheduler, allocator = self._scheduler, self._allocator
        if state.queue_ticket is None:
            raise IllegalPlan(
                f"{type(scheduler.batching).__name__} admitted request {state.id}, which is {state.status.value}"
            )
        if self.preempted or self.budget.num_seats < 1 or self.budget.num_tokens < 1:
            return 0
        if scheduler.refused_admission == (state.id, self.budget.num_tokens, allocator.num_releases):
            return 0
        hits = allocator.lookup(state)
        start, known = len(hits) * scheduler.limits.block_size, state.num_known_tokens
        wanted = known - start if num_tokens is None else min(num_tokens, known - start)
        end = start + min(wanted, self.budget.num_tokens)
        if whole and wanted > self.budget.num_tokens and self.num_chunks:
            return 0
        gate = known if scheduler.policy.scheduler_reserve_full_isl else end
        need = max(0, allocator.num_missing(state, gate) - len(hits))
        keep = scheduler.watermark_blocks if scheduler.running else 0
        if not allocator.fits(need + allocator.num_reclaimed(hits), keep):
            scheduler.refused_admission = (state.id, self.budget.num_tokens, allocator.num_releases)
            return 0
        self._seat(state, hits, start)
        self._append_blocks(state, end)
        self._assign(state, end - start)
        return end - start

    def wake_at(self, now_ns: int) -> None:
        """If nothing is scheduled, ask again at this time at the latest."""
        self.wake_ns = now_ns if self.wake_ns is None else min(self.wake_ns, now_ns)

    # How it is done.

    def _seat(self, state: RequestState, hits: tuple[int, ...], start: int) -> None:
        scheduler = self._scheduler
        self.budget.take(scheduler.batching, 0, 1)
        scheduler.waiting.remove(state)
        state.move(Status.RUNNING)
        scheduler.num_admissions += 1
        state.admission = scheduler.num_admissions
        scheduler.running[state.id] = scheduler.prefilling[state.id] = state
        self._allocator.take_hits(state, hits)
        state.base_computed = start
        state.samples_since = None
        self.new_blocks[state.id] = hits
        self.num_prefix_hit_tokens += start
        if state.first_schedule_ns is None:
            state.first_schedule_ns = self.now_ns
            state.num_prefix_hit_tokens = start
            self.new_requests[state.id] = state.request

    def _assign(self, state: RequestState, num_tokens: int) -> None:
        """Book a chunk whose blocks are held."""
        self.budget.take(self._scheduler.batching, num_tokens)
        start = state.base_computed
        samples = num_tokens == state.num_remaining_tokens
        self.chunks[state.id] = PrefillChunk(state.id, start, num_tokens, samples)
        state.base_computed += num_tokens
        self._allocator.num_live_tokens += num_tokens
        again = max(0, min(state.base_computed, state.high_water) - start)
        state.num_recomputed_tokens += again
        self.num_recomputed_tokens += again

    def _obtain(self, state: RequestState, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for a running request, preempting others if need be; None: it cannot go on in this step.

        It stops preempting as soon as blocks that steps in flight still hold will do: more victims would
        free nothing sooner.
        """
        allocator, scheduler = self._allocator, self._scheduler
        while True:
            need = allocator.num_missing(state, num_tokens)
            if allocator.fits(need):
                return self._append_blocks(state, num_tokens)
            coming = allocator.num_quarantined_blocks + scheduler.num_draining_blocks()
            if need <= allocator.num_free_blocks + coming:
                return None
            victim = scheduler.choose_victim(state, self.now_ns)
            if victim is None:
                return None
            self._preempt(victim)
            if victim is state:
                return None

    def _append_blocks(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        allocator, limits = self._allocator, self._scheduler.limits
        blocks = allocator.grow(state, num_tokens)
        if len(state.block_table) * limits.block_size < num_tokens or not all(
            0 <= block < limits.num_blocks for block in blocks
        ):
            raise IllegalPlan(
                f"{type(allocator).__name__} gave request {state.id} blocks {blocks} of a pool of "
                f"{limits.num_blocks}; its table of {len(state.block_table)} must hold {num_tokens} tokens"
            )
        if blocks:
            self.new_blocks[state.id] = self.new_blocks.get(state.id, ()) + blocks
        return blocks

    def _preempt(self, victim: RequestState) -> None:
        """Take back what the step gave the victim, then its blocks; it goes to the front of the queue."""
        scheduler = self._scheduler
        chunk = self.chunks.pop(victim.id, None)
        if chunk is not None:
            victim.base_computed -= chunk.num_tokens
            self._allocator.num_live_tokens -= chunk.num_tokens
            again = max(0, min(chunk.start + chunk.num_tokens, victim.high_water) - chunk.start)
            victim.num_recomputed_tokens -= again
            self.num_recomputed_tokens -= again
        in_round = self.decodes and victim.group is not None
        self.new_blocks.pop(victim.id, None)
        if self.new_requests.pop(victim.id, None) is not None:
            victim.first_schedule_ns = None
            self.num_prefix_hit_tokens -= victim.num_prefix_hit_tokens
        scheduler.unseat(victim)
        self.budget.give_back((chunk.num_tokens if chunk else 0) + in_round, 1)
        victim.move(Status.PREEMPTED)
        victim.num_preemptions += 1
        victim.high_water = max(victim.high_water, victim.base_computed)
        victim.base_computed = 0
        self.preempted.append(victim.id)
        scheduler.waiting.push(victim, self.now_ns, resumes=True)
