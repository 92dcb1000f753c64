"""The step being composed: the verbs a batching rule has, each checked against budget and blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedserve.policy.errors import IllegalPlan
from pagedserve.policy.plan import PrefillChunk
from pagedserve.policy.request import Request, RequestState, Status

if TYPE_CHECKING:
    from pagedserve.policy.scheduler import Scheduler


class Step:
    """One step under composition: its budget, what was chosen so far, and the verbs that choose.

    ``num_tokens`` and ``num_seats`` are what may still be spent; blocks are the allocator's own count. Every
    choice takes from them, and preempting a request gives back what the step had given it. A request that
    was denied blocks (``scheduler.wanting``) has the next claim to them: nothing is admitted before.
    """

    def __init__(self, scheduler: Scheduler, now_ns: int) -> None:
        self._scheduler, self._allocator = scheduler, scheduler.allocator
        self._rule = type(scheduler.batching).__name__
        self.now_ns = now_ns
        self.number = scheduler.next_step
        self._num_tokens = scheduler.limits.max_num_batched_tokens
        self.chunks: dict[int, PrefillChunk] = {}
        self.decodes = False
        self.new_requests: dict[int, Request] = {}
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.preempted: list[int] = []
        self._hits: dict[int, int] = {}
        self.wake_ns: int | None = None
        self.num_recomputed_tokens = self.num_prefix_hit_tokens = 0

    # What a rule may look at.

    @property
    def num_tokens(self) -> int:
        """Tokens that may still be scheduled in this step."""
        return self._num_tokens

    @property
    def num_seats(self) -> int:
        """Requests that may still be admitted."""
        return self._scheduler.limits.max_num_seqs - len(self._scheduler.running)

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, preempted ones included."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> list[RequestState]:
        """Requests that hold a seat, in admission order."""
        return list(self._scheduler.running.values())

    def prefilling(self) -> list[RequestState]:
        """Running requests with known tokens to compute and no chunk in this step, in admission order."""
        return [state for state in self._scheduler.prefilling.values() if state.id not in self.chunks]

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
        if self.decodes:
            raise IllegalPlan(f"{self._rule} asked for the decodes of step {self.number} twice")
        needy = group.needing_block()
        if scheduler.stalled:
            needy = sorted([*needy, *scheduler.stalled.values()], key=lambda state: state.admission)
        for state in needy:
            if state.status is not Status.RUNNING:
                continue
            blocks = self._obtain(state, state.num_computed_tokens + 1)
            if blocks is None and state.group is not None:
                scheduler.break_run(state)
                group.leave(state)
                scheduler.stalled[state.id] = state
            elif blocks is not None and state.group is not None:
                group.grown(state)
            elif blocks is not None:
                del scheduler.stalled[state.id]
                group.join(state, self.number)
        self._spend(len(group))
        self.decodes = len(group) > 0

    def continue_prefills(self) -> None:
        """Go on with running requests' known tokens, oldest first, as far as the token budget reaches."""
        for state in self.prefilling():
            if self.num_tokens:
                self.chunk(state)

    def chunk(self, state: RequestState, num_tokens: int | None = None) -> int:
        """Compute up to ``num_tokens`` (default: all) known tokens of a running request.

        Returns the tokens scheduled: fewer if the budget ends, 0 if no blocks could be had or this step
        preempted the request.
        """
        if state.id in self.preempted:
            return 0
        wanted = state.num_remaining_tokens if num_tokens is None else num_tokens
        if state.id in self.chunks or state.id not in self._scheduler.prefilling or wanted < 1:
            raise IllegalPlan(
                f"{self._rule} asked for a chunk of {wanted} tokens of request {state.id}, which is "
                f"{state.status.value}, has {state.num_remaining_tokens} tokens to compute and "
                f"{int(state.id in self.chunks)} chunks in this step"
            )
        wanted = min(wanted, state.num_remaining_tokens, self.num_tokens)
        if wanted < 1 or self._obtain(state, state.num_computed_tokens + wanted) is None:
            return 0
        return self._assign(state, wanted)

    def admit_in_order(self, max_requests: int | None = None, whole: bool = False) -> int:
        """Admit waiting requests in admission order until one does not fit; return how many.

        ``whole``: a prompt that does not fit what is left of the token budget waits for the next step, unless
        nothing of it has been spent: then it is cut, or it would never run.
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

        Nothing is admitted without a seat, a token and blocks, nor in a step that preempted or while a running
        request was denied blocks: what gets free belongs to those who needed it. Blocks must suffice for all
        known tokens (``scheduler_reserve_full_isl``) or for the first chunk, and leave the watermark when
        others run.
        """
        scheduler, allocator = self._scheduler, self._allocator
        if state.queue_ticket is None:
            raise IllegalPlan(f"{self._rule} admitted request {state.id}, which is {state.status.value}")
        attempt = (state.queue_ticket, num_tokens, self.num_tokens, allocator.num_releases)
        if self.preempted or scheduler.wanting or not self.num_seats or not self.num_tokens:
            return 0
        if scheduler.refused_admission == attempt:
            return 0
        hits = allocator.lookup(state)
        start, known = len(hits) * scheduler.limits.block_size, state.num_known_tokens
        start = max(start, state.num_swapped_tokens)
        wanted = known - start if num_tokens is None else min(num_tokens, known - start)
        if wanted < 1:
            who = self._rule if start < known else type(allocator).__name__
            raise IllegalPlan(
                f"{who} left request {state.id} {wanted} of {known} tokens to compute; it needs 1"
            )
        if whole and self.num_tokens < min(wanted, scheduler.limits.max_num_batched_tokens):
            return 0
        end = start + min(wanted, self.num_tokens)
        gate = known if scheduler.policy.scheduler_reserve_full_isl else end
        need = max(0, allocator.num_missing(state, gate) - len(hits)) + allocator.num_reclaimed(hits)
        if not allocator.fits(need, scheduler.watermark_blocks if scheduler.running else 0):
            scheduler.refused_admission = attempt
            return 0
        self._seat(state, hits, start)
        self._append_blocks(state, end)
        scheduler.host.bring_back(state, len(hits), scheduler.limits.block_size)
        return self._assign(state, end - start)

    def preempt(self, victim: RequestState) -> None:
        """Take back what the step gave a running request, then its blocks; it goes to the queue's front.

        The preemption mode may have its KV copied to host memory first.
        """
        if victim.id not in self._scheduler.running or victim.id in self._scheduler.draining:
            raise IllegalPlan(f"{self._rule} preempted request {victim.id}, which is {victim.status.value}")
        chunk = self.chunks.pop(victim.id, None)
        if chunk is not None:
            self._book(victim, chunk, -1)
        self._num_tokens += chunk.num_tokens if chunk else int(self.decodes and victim.group is not None)
        self.new_blocks.pop(victim.id, None)
        if self.new_requests.pop(victim.id, None) is not None:
            victim.first_schedule_ns, victim.num_prefix_hit_tokens = None, 0
        table = victim.block_table
        self._scheduler.unseat(victim)
        victim.move(Status.PREEMPTED)
        victim.num_preemptions += 1
        if victim.id in self._hits:
            self.num_prefix_hit_tokens -= self._hits.pop(victim.id)
            self._scheduler.host.undo(victim)
        else:
            victim.high_water = max(victim.high_water, victim.base_computed)
            self._scheduler.swap_out(victim, table)
        victim.base_computed = 0
        self.preempted.append(victim.id)
        self._scheduler.waiting.push(victim, self.now_ns, resumes=True)

    def wake_at(self, now_ns: int) -> None:
        """If nothing is scheduled, ask again at this time at the latest, though nothing happens meanwhile."""
        self.wake_ns = now_ns if self.wake_ns is None else min(self.wake_ns, now_ns)

    # How it is done.

    def _spend(self, num_tokens: int) -> None:
        if num_tokens > self.num_tokens:
            raise IllegalPlan(
                f"{self._rule} asked for {num_tokens} tokens; the step has {self.num_tokens} left"
            )
        self._num_tokens -= num_tokens

    def _seat(self, state: RequestState, hits: tuple[int, ...], start: int) -> None:
        scheduler = self._scheduler
        scheduler.waiting.remove(state)
        state.move(Status.RUNNING)
        scheduler.num_admissions += 1
        state.admission = scheduler.num_admissions
        scheduler.running[state.id] = scheduler.prefilling[state.id] = state
        scheduler.ledger.shared(hits)
        self._allocator.take_hits(state, hits)
        state.base_computed, state.samples_since = start, None
        self.new_blocks[state.id] = hits
        cached = self._hits[state.id] = len(hits) * scheduler.limits.block_size
        self._allocator.num_live_tokens += start - cached
        self.num_prefix_hit_tokens += cached
        if state.first_schedule_ns is None:
            state.first_schedule_ns, state.num_prefix_hit_tokens = self.now_ns, cached
            self.new_requests[state.id] = state.request

    def _assign(self, state: RequestState, num_tokens: int) -> int:
        """Book a chunk whose blocks are held."""
        self._spend(num_tokens)
        samples = num_tokens == state.num_remaining_tokens
        chunk = self.chunks[state.id] = PrefillChunk(state.id, state.base_computed, num_tokens, samples)
        self._book(state, chunk, 1)
        return num_tokens

    def _book(self, state: RequestState, chunk: PrefillChunk, sign: int) -> None:
        """Count a chunk's tokens as computed, or take that back."""
        again = sign * max(0, min(chunk.start + chunk.num_tokens, state.high_water) - chunk.start)
        state.base_computed += sign * chunk.num_tokens
        self._allocator.num_live_tokens += sign * chunk.num_tokens
        state.num_recomputed_tokens += again
        self.num_recomputed_tokens += again

    def _obtain(self, state: RequestState, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for a running request, preempting others if need be; None: it cannot go on in this step.

        It stops preempting as soon as blocks that steps in flight still hold will do: more victims would
        free nothing sooner.
        """
        allocator, scheduler = self._allocator, self._scheduler
        while not allocator.fits(need := allocator.num_missing(state, num_tokens)):
            coming = allocator.num_quarantined_blocks + scheduler.num_draining_blocks()
            victim = None
            if need > allocator.num_free_blocks + coming:
                victim = scheduler.choose_victim(state, self.now_ns)
            if victim is None:
                scheduler.wanting[state.id] = state
                return None
            self.preempt(victim)
            if victim is state:
                return None
        scheduler.wanting.pop(state.id, None)
        return self._append_blocks(state, num_tokens)

    def _append_blocks(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        scheduler, blocks = self._scheduler, self._allocator.grow(state, num_tokens)
        scheduler.ledger.granted(state, num_tokens, scheduler.limits.block_size, blocks)
        if blocks:
            self.new_blocks[state.id] = self.new_blocks.get(state.id, ()) + blocks
        return blocks
