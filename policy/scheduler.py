"""The four verbs: add, abort, schedule, commit. All decisions of engine and simulator are made here."""

import copy
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from pagedserve.policy.admission import admissible_limit
from pagedserve.policy.batching import BatchingRule
from pagedserve.policy.blocks import Allocator
from pagedserve.policy.errors import DuplicateRequest, IllegalPlan, QueueFull
from pagedserve.policy.group import DecodeGroup
from pagedserve.policy.invariants import check_scheduler
from pagedserve.policy.limits import Limits
from pagedserve.policy.orders import VictimRule
from pagedserve.policy.plan import Finished, Outcome, StepPlan
from pagedserve.policy.queue import WaitingQueue
from pagedserve.policy.request import Request, RequestState, Status
from pagedserve.policy.spec import Policy
from pagedserve.policy.step import Step


@dataclass(slots=True)
class InFlightState:
    """A scheduled step until its commit."""

    plan: StepPlan
    publishes: list[tuple[RequestState, int, int]]
    """(request, block index, block) filled by the step."""
    ends: list[RequestState]
    """Requests that sample their last token in the step."""
    dead: set[int] = field(default_factory=set)
    """Requests whose token of this step is discarded: they ended while it was in flight."""


class Scheduler:
    """Request states, the waiting queue and the KV pool, driven by a `Policy` within `Limits`.

    ``overlap_depth`` 0: schedule, launch, wait, commit. 1: a step may be scheduled while the one before is
    in flight. At one instant the order of calls is commit, abort, add, schedule. The work of a step follows
    what changes, not what runs.
    """

    def __init__(self, policy: Policy, limits: Limits, overlap_depth: int = 0) -> None:
        if overlap_depth not in (0, 1):
            raise ValueError(f"overlap_depth is {overlap_depth}; it is 0 or 1")
        self.policy = policy
        self.limits = limits
        self.overlap_depth = overlap_depth
        self.batching: BatchingRule = copy.deepcopy(policy.part("batching"))
        self.allocator: Allocator = copy.deepcopy(policy.part("allocator"))
        self.allocator.bind(limits, policy.enable_prefix_caching)
        self._victims: VictimRule = copy.deepcopy(policy.part("victim"))
        self.waiting = WaitingQueue(copy.deepcopy(policy.part("order")))
        self.group = DecodeGroup(limits.block_size)
        self.states: dict[int, RequestState] = {}
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.stalled: dict[int, RequestState] = {}
        self.draining: dict[int, RequestState] = {}
        self.in_flight: deque[InFlightState] = deque()
        self.next_step = 0
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_discarded_tokens = 0
        self.refused_admission: tuple[int, int, int] | None = None
        self.watermark_blocks = int(policy.watermark * limits.num_blocks)
        self._num_intake = 0
        self._departed: list[int] = []
        self._untold_preempted: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is neither finished nor aborted."""
        return bool(self.states)

    @property
    def num_wasted_slots(self) -> int:
        """Slots of used blocks that hold no token."""
        used = self.limits.num_blocks - self.allocator.num_free_blocks
        return used * self.limits.block_size - self.allocator.num_live_tokens

    # The verbs.

    def add(self, request: Request, now_ns: int) -> RequestState:
        """Queue a request, or raise a `RequestRefused` naming the numbers if it can never run."""
        if request.id in self.states:
            raise DuplicateRequest(f"request {request.id} is running or waiting already; ids must be unique")
        queue_limit = self.limits.max_num_queued_reqs
        if queue_limit is not None and len(self.waiting) >= queue_limit:
            raise QueueFull(f"{len(self.waiting)} requests wait and max_num_queued_reqs is {queue_limit}; retry later")
        state = RequestState(request, admissible_limit(request, self.limits), self._num_intake)
        if request.prefix_keys is not None and self.policy.enable_prefix_caching:
            state.block_keys = list(request.prefix_keys)
        self._num_intake += 1
        self.states[request.id] = state
        self.waiting.push(state, now_ns)
        return state

    def abort(self, request: int, now_ns: int) -> bool:
        """End a request in whatever state it is; False if it has ended already or is not known.

        Its blocks are free at once, or when the newest step in flight that touches them commits.
        """
        state = self.states.get(request)
        if state is None:
            return False
        self._end(state, "abort", Status.ABORTED)
        return True

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step and change progress accordingly; the plan may be empty."""
        if len(self.in_flight) > self.overlap_depth:
            raise RuntimeError(
                f"{len(self.in_flight)} steps are in flight and overlap_depth is {self.overlap_depth}; "
                "commit the oldest first"
            )
        step = Step(self, now_ns)
        self.batching.compose(step)
        self.num_preemptions += len(step.preempted)
        if not step.chunks and not step.decodes:
            return self._empty_plan(step)
        return self._launchable_plan(step)

    def commit(self, step: int, outcomes: Iterable[Outcome], now_ns: int) -> list[Finished]:
        """Take the outcomes of the oldest step in flight; return the requests that ended with it.

        Order of effects: keys of filled blocks are published, stops end requests, output limits end
        requests, blocks that waited for the step become free.
        """
        if not self.in_flight or self.in_flight[0].plan.step != step:
            expected = self.in_flight[0].plan.step if self.in_flight else None
            raise RuntimeError(f"commit of step {step}; the oldest step in flight is {expected}")
        flight = self.in_flight[0]
        told = {outcome.request: outcome for outcome in outcomes}
        self._check_outcomes(flight, told)
        self.in_flight.popleft()
        self._publish(flight, told)
        finished: list[Finished] = []
        for outcome in told.values():
            if outcome.stop_reason is not None and outcome.request not in flight.dead:
                finished.append(self._finish(self.states[outcome.request], outcome.stop_reason))
        for state in flight.ends:
            if state.id not in flight.dead and state.status not in (Status.FINISHED, Status.ABORTED):
                finished.append(self._finish(state, "length"))
        self.num_discarded_tokens += len(flight.dead)
        self.allocator.committed(step)
        return finished

    # Planning.

    def _empty_plan(self, step: Step) -> StepPlan:
        """Nothing to launch; what changed is told with the next plan that is launched."""
        self._untold_preempted += step.preempted
        blocked = len(self.running) - len(self.draining)
        if blocked and not self.in_flight and step.wake_ns is None:
            raise IllegalPlan(
                f"{type(self.batching).__name__} scheduled nothing although {blocked} requests hold KV blocks "
                "and no step is in flight; schedule them, or say with wake_at() when to ask again"
            )
        return StepPlan(None, wake_ns=step.wake_ns)

    def _launchable_plan(self, step: Step) -> StepPlan:
        shape = self.group.shape(
            tuple([(chunk.num_tokens, chunk.start) for chunk in step.chunks.values()]),
            sum(chunk.samples for chunk in step.chunks.values()),
            step.decodes,
        )
        decodes = self.group.ids() if step.decodes else ()
        joined, left = self.group.take_changes()
        number = self.next_step
        self.next_step += 1
        publishes: list[tuple[RequestState, int, int]] = []
        ends = self._run_group(number, publishes) if step.decodes else []
        for chunk in step.chunks.values():
            self._run_chunk(chunk.request, chunk.start, number, chunk.samples, publishes, ends)
        plan = StepPlan(
            number,
            tuple(step.new_requests.values()),
            tuple(step.chunks.values()),
            decodes,
            joined,
            left,
            tuple(self._untold_preempted + step.preempted),
            tuple(self._departed),
            tuple([(owner, blocks) for owner, blocks in step.new_blocks.items() if blocks]),
            tuple([(s.id, i) for s, i, _ in publishes if s.block_keys is not None and i >= len(s.block_keys)]),
            shape,
            step.num_recomputed_tokens,
            step.num_prefix_hit_tokens,
        )
        self._departed.clear()
        self._untold_preempted.clear()
        self.in_flight.append(InFlightState(plan, publishes, ends))
        return plan

    def _run_group(self, number: int, publishes: list[tuple[RequestState, int, int]]) -> list[RequestState]:
        """Do the group's round; return those that sample their last token."""
        self.allocator.num_live_tokens += len(self.group)
        ends = self.group.run(number)
        for state in ends:
            self.draining[state.id] = state
        if self.policy.enable_prefix_caching:
            size = self.limits.block_size
            filling = [state for state in ends if state.base_computed % size == 0]
            for state in filling + self.group.filling_block():
                index = state.num_computed_tokens // size - 1
                publishes.append((state, index, state.block_table[index]))
        return ends

    def _run_chunk(
        self,
        request: int,
        start: int,
        number: int,
        samples: bool,
        publishes: list[tuple[RequestState, int, int]],
        ends: list[RequestState],
    ) -> None:
        """Book a chunk's progress; a request whose chunk samples goes on in the decode group."""
        state = self.states[request]
        state.base_last_step = number
        if self.policy.enable_prefix_caching:
            size = self.limits.block_size
            for index in range(start // size, state.base_computed // size):
                publishes.append((state, index, state.block_table[index]))
        if not samples:
            return
        del self.prefilling[request]
        state.base_sampled += 1
        if state.base_sampled == state.limit:
            state.samples_since = number
            self.draining[request] = state
            ends.append(state)
        else:
            self.group.join(state, number)

    def choose_victim(self, needy: RequestState, now_ns: int) -> RequestState | None:
        """The victim rule's choice among running requests whose preemption frees a block.

        Requests whose blocks are all shared are passed over; if that leaves nobody, the rule's first choice
        goes all the same, for then only several victims together free a block.
        """
        candidates = [state for state in self.running.values() if state.id not in self.draining]
        fallback = None
        while candidates:
            victim = self._victims.pick(candidates, now_ns)
            if victim is None:
                return None
            if victim not in candidates:
                raise IllegalPlan(
                    f"{type(self._victims).__name__} picked request {victim.id}, which is {victim.status.value} "
                    "and not among the candidates it was given"
                )
            if victim is needy or self.allocator.num_releasable(victim):
                return victim
            fallback = fallback or victim
            candidates.remove(victim)
        return fallback

    def num_draining_blocks(self) -> int:
        """Blocks of requests that end with a step in flight."""
        return sum(len(state.block_table) for state in self.draining.values())

    # Endings.

    def unseat(self, state: RequestState) -> None:
        """Take away seat and blocks; the one release path of finish, abort and preemption."""
        if state.group is not None:
            self.group.leave(state)
        del self.running[state.id]
        for place in (self.prefilling, self.stalled, self.draining):
            place.pop(state.id, None)
        last = state.base_last_step
        in_flight = last is not None and last > self._last_committed()
        self.allocator.release(state, last if in_flight else None)

    def _last_committed(self) -> int:
        return self.next_step - 1 - len(self.in_flight)

    def _finish(self, state: RequestState, reason: str) -> Finished:
        self._end(state, reason, Status.FINISHED)
        return Finished(state.id, reason, state.num_output_tokens)

    def _end(self, state: RequestState, reason: str, status: Status) -> None:
        """End a request; what steps in flight still sample for it will be discarded."""
        pending = [flight for flight in self.in_flight if _samples_in(state, flight)]
        for flight in pending:
            flight.dead.add(state.id)
        if state.queue_ticket is not None:
            self.waiting.remove(state)
        if state.id in self.running:
            self.unseat(state)
        state.base_sampled -= len(pending)
        state.finish_reason = reason
        state.move(status)
        del self.states[state.id]
        if state.first_schedule_ns is not None:
            self._departed.append(state.id)

    # Outcomes.

    def _check_outcomes(self, flight: InFlightState, told: dict[int, Outcome]) -> None:
        """Every outcome must belong to the step, and every key that is due must be there."""
        plan = flight.plan
        due: dict[int, int] = {}
        for request, _ in plan.filled:
            if request in self.states and request not in flight.dead:
                due[request] = due.get(request, 0) + 1
        if not told and not due:
            return
        sampled = {*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)}
        in_step = sampled.union(chunk.request for chunk in plan.chunks)
        for request, outcome in told.items():
            if request not in in_step:
                raise ValueError(f"outcome for request {request}, which has no part in step {plan.step}")
            if outcome.num_tokens != (request in sampled) or (outcome.stop_reason and request not in sampled):
                raise ValueError(
                    f"outcome of request {request} has {outcome.num_tokens} tokens and stop reason "
                    f"{outcome.stop_reason!r}; step {plan.step} samples {int(request in sampled)} for it"
                )
            if request in flight.dead:
                due.pop(request, None)
            elif len(outcome.new_block_keys) != due.pop(request, 0):
                raise ValueError(
                    f"outcome of request {request} has {len(outcome.new_block_keys)} block keys; step "
                    f"{plan.step} filled other blocks of it: see the plan's filled"
                )
        if due:
            raise ValueError(f"step {plan.step} filled blocks of requests {sorted(due)}; give their keys")

    def _publish(self, flight: InFlightState, told: dict[int, Outcome]) -> None:
        """Put the blocks that the step filled under their keys."""
        position: dict[int, int] = {}
        for state, index, block in flight.publishes:
            if state.block_keys is None:
                continue
            if index >= len(state.block_keys):
                outcome = told.get(state.id)
                if outcome is None or state.id in flight.dead:
                    continue
                at = position.get(state.id, 0)
                position[state.id] = at + 1
                key: Hashable = outcome.new_block_keys[at]
                assert index == len(state.block_keys), f"block {index} of request {state.id} is keyed out of order"
                state.block_keys.append(key)
            self.allocator.publish(block, state.block_keys[index])

    # Foresight and self-examination.

    def steady_for(self, now_ns: int) -> int:
        """For how many coming steps the decode group alone runs, unchanged but for appended blocks.

        Holds unless something is added, aborted or stopped. 0 whenever that cannot be promised.
        """
        members = len(self.group)
        if self.prefilling or self.stalled or self.draining or not members:
            return 0
        by_rule = getattr(self.batching, "steady_for", None)
        rule = by_rule(Step(self, now_ns)) if by_rule is not None else 0
        # Any window of m * block_size rounds asks m blocks of each member at most.
        by_blocks = self.allocator.num_free_blocks // members * self.limits.block_size
        return max(0, min(rule, by_blocks, self.group.rounds_to_next_limit()))

    def check(self) -> None:
        """Recompute every invariant from scratch; AssertionError names what is off."""
        check_scheduler(self)


def _samples_in(state: RequestState, flight: InFlightState) -> bool:
    """Whether the step in flight samples a token of the request."""
    first, last, step = state.samples_since, state.last_step, flight.plan.step
    if first is None or last is None or step is None or not first <= step <= last:
        return False
    return step == first or bool(flight.plan.decodes)
