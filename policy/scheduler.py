"""The four verbs: add, abort, schedule, commit. All decisions of engine and simulator are made here."""

import copy
from collections import deque
from collections.abc import Iterable

from pagedserve.policy.batching import BatchingRule
from pagedserve.policy.blocks import Allocator
from pagedserve.policy.errors import DuplicateRequest, IllegalPlan, QueueFull
from pagedserve.policy.group import DecodeGroup
from pagedserve.policy.in_flight import InFlightState
from pagedserve.policy.invariants import check_scheduler
from pagedserve.policy.launch import launch
from pagedserve.policy.ledger import BlockLedger
from pagedserve.policy.limits import Limits
from pagedserve.policy.orders import VictimRule, choose_victim
from pagedserve.policy.plan import Finished, Outcome, StepPlan
from pagedserve.policy.queue import WaitingQueue
from pagedserve.policy.request import Request, RequestState, Status
from pagedserve.policy.spec import PARTS, Policy
from pagedserve.policy.step import Step
from pagedserve.policy.swap import HostPool, PreemptionMode, SwapToHost


class Scheduler:
    """Request states, the waiting queue and the KV pool, driven by a `Policy` within `Limits`.

    ``overlap_depth`` 0: schedule, launch, wait, commit. 1: a step may be scheduled while the one before is
    in flight. At one instant the order of calls is commit, abort, add, schedule. The work of a step follows
    what changes, not what runs.
    """

    def __init__(self, policy: Policy, limits: Limits, overlap_depth: int = 0) -> None:
        if overlap_depth not in (0, 1):
            raise ValueError(f"overlap_depth is {overlap_depth}; it is 0 or 1")
        self.policy, self.limits, self.overlap_depth = policy, limits, overlap_depth
        # One copy of all parts together, so that what two of them share stays shared.
        parts = copy.deepcopy({kind: policy.part(kind) for kind in PARTS})
        self.batching: BatchingRule = parts["batching"]
        self.victims: VictimRule = parts["victim"]
        self.preemption_mode: PreemptionMode = parts["preemption_mode"]
        self.waiting = WaitingQueue(parts["order"])
        self.allocator: Allocator = parts["allocator"]
        self.allocator.bind(limits, policy.enable_prefix_caching)
        if isinstance(self.preemption_mode, SwapToHost) and not limits.num_cpu_blocks:
            raise ValueError(
                "preemption_mode is swap and num_cpu_blocks is 0; give host memory, or recompute"
            )
        self.host = HostPool(limits.num_cpu_blocks)
        self.ledger = BlockLedger(limits.num_blocks, type(self.allocator).__name__)
        self.watermark_blocks = int(policy.watermark * limits.num_blocks)
        self.group = DecodeGroup(limits.block_size)
        self.states: dict[int, RequestState] = {}
        # Running requests by admission, and the three places beside the decode group where they may be:
        # computing known tokens, wanting a block to decode on, or waiting for the commit of their last token.
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.stalled: dict[int, RequestState] = {}
        self.draining: dict[int, RequestState] = {}
        self.in_flight: deque[InFlightState] = deque()
        self.next_step = self.num_admissions = self.num_preemptions = self.num_discarded_tokens = 0
        # Running requests that were denied blocks, and the last admission attempt that was refused.
        self.wanting: dict[int, RequestState] = {}
        self.refused_admission: tuple[int, int | None, int, int] | None = None
        self._num_intake = 0
        self._departed: list[int] = []
        self._preempted: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is neither finished nor aborted."""
        return bool(self.states)

    @property
    def last_committed(self) -> int:
        """The newest step that has committed, -1 before the first."""
        return self.next_step - 1 - len(self.in_flight)

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
        state = RequestState(request, self.limits.output_limit(request), self._num_intake)
        most = self.limits.max_num_queued_reqs
        if most is not None and len(self.waiting) >= most:
            raise QueueFull(
                f"{len(self.waiting)} requests wait and max_num_queued_reqs is {most}; retry later"
            )
        if request.prefix_keys is not None and self.policy.enable_prefix_caching:
            state.block_keys = list(request.prefix_keys)
        self.waiting.push(state, now_ns)
        self._num_intake += 1
        self.states[request.id] = state
        return state

    def abort(self, request: int, now_ns: int) -> bool:
        """End a request in whatever state it is; False if it has ended already or is not known.

        Its blocks are free at once, or when the newest step in flight that touches them commits.
        """
        state = self.states.get(request)
        if state is not None:
            self._end(state, "abort", Status.ABORTED)
        return state is not None

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step and change progress accordingly; the plan may be empty.

        What an empty plan changed (preemptions) is told with the next plan that is launched.
        """
        if len(self.in_flight) > self.overlap_depth:
            limit = f"overlap_depth is {self.overlap_depth}"
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight and {limit}; commit the oldest")
        step = self._compose(now_ns)
        if step.preempted and not self.running and not self.in_flight:
            # All gave way: there is room for the first of them now, and no other event to wait for.
            step = self._compose(now_ns)
        if step.chunks or (step.decodes and self.group.members):
            plan = launch(self, step, self._departed, self._preempted)
            self._departed.clear()
            self._preempted.clear()
            return plan
        blocked = len(self.running) - len(self.draining)
        if blocked and not self.in_flight and step.wake_ns is None:
            raise IllegalPlan(
                f"{type(self.batching).__name__} scheduled nothing although {blocked} requests hold KV "
                "blocks and no step is in flight: they would hold them for ever"
            )
        return StepPlan(None, wake_ns=step.wake_ns)

    def commit(self, step: int, outcomes: Iterable[Outcome], now_ns: int) -> list[Finished]:
        """Take the outcomes of the oldest step in flight; return the requests that ended with it.

        Order of effects: keys of filled blocks are published, stops end requests, output limits end
        requests, blocks that waited for the step become free.
        """
        flight = self.in_flight[0] if self.in_flight else None
        if flight is None or flight.plan.step != step:
            raise RuntimeError(
                f"commit of step {step}; the oldest step in flight is {flight.plan.step if flight else None}"
            )
        told: dict[int, Outcome] = {}
        for outcome in outcomes:
            if told.setdefault(outcome.request, outcome) is not outcome:
                raise ValueError(f"two outcomes of request {outcome.request} in step {step}; give one")
        if told or flight.plan.filled:
            flight.check_outcomes(told, self.states)
        self.in_flight.popleft()
        flight.publish(told, self.allocator)
        stops = [o for o in told.values() if o.stop_reason is not None and o.request not in flight.dead]
        # In one order, however the caller lists them: it decides which blocks are given out next.
        stops.sort(key=lambda stop: self.states[stop.request].admission)
        finished = [self._finish(self.states[s.request], str(s.stop_reason), 1 - s.num_tokens) for s in stops]
        ends = [s for s in flight.ends if s.id not in flight.dead and s.finish_reason is None]
        finished += [self._finish(state, "length") for state in ends]
        self.num_discarded_tokens += len(flight.dead)
        self.ledger.committed(step)
        self.allocator.committed(step)
        return finished

    # Planning.

    def _compose(self, now_ns: int) -> Step:
        step = Step(self, now_ns)
        self.batching.compose(step)
        self.num_preemptions += len(step.preempted)
        self._preempted += step.preempted
        return step

    def choose_victim(self, needy: RequestState, now_ns: int) -> RequestState | None:
        """Who gives way to ``needy``; see `pagedserve.policy.orders.choose_victim`."""
        candidates = [state for state in self.running.values() if state.id not in self.draining]
        return choose_victim(self.victims, candidates, needy, self.allocator.num_releasable, now_ns)

    def num_draining_blocks(self) -> int:
        """Blocks of requests that end with a step in flight."""
        return sum([len(state.block_table) for state in self.draining.values()])

    def swap_out(self, victim: RequestState, table: list[int]) -> None:
        """Plan the copy of an unseated victim's KV to host memory, if the mode says so and there is room."""
        num_blocks = -(-victim.base_computed // self.limits.block_size)
        free = self.host.num_free_blocks
        if num_blocks and self.preemption_mode.swaps(victim, num_blocks, free) and num_blocks <= free:
            self.host.take_out(victim, table[:num_blocks], victim.base_computed)

    # Endings.

    def break_run(self, state: RequestState) -> None:
        """It samples no more for now: note the steps in flight that did."""
        if self.in_flight:
            steps = [flight.plan.step for flight in self.in_flight if flight.samples(state)]
            state.earlier_samples = tuple([step for step in steps if step is not None])

    def unseat(self, state: RequestState) -> None:
        """Take away seat and blocks; the one release path of finish, abort and preemption."""
        self.break_run(state)
        if state.group is not None:
            self.group.leave(state)
        del self.running[state.id]
        for place in (self.prefilling, self.stalled, self.draining, self.wanting):
            place.pop(state.id, None)
        last = state.base_last_step
        fence = last if last is not None and last > self.last_committed else None
        self.ledger.returned(state.block_table, fence)
        self.allocator.release(state, fence)

    def _finish(self, state: RequestState, reason: str, num_failed: int = 0) -> Finished:
        self._end(state, reason, Status.FINISHED)
        state.base_sampled -= num_failed  # tokens of the step that could not be chosen
        return Finished(state.id, reason, state.num_output_tokens)

    def _end(self, state: RequestState, reason: str, status: Status) -> None:
        """End a request; what steps in flight still sample for it will be discarded."""
        pending = [flight for flight in self.in_flight if flight.samples(state)]
        for flight in pending:
            flight.dead.add(state.id)
        if state.queue_ticket is not None:
            self.waiting.remove(state)
        if state.id in self.running:
            self.unseat(state)
        if state.host_blocks:
            self.host.drop(state)
        state.base_sampled -= len(pending)
        state.finish_reason = reason
        state.move(status)
        del self.states[state.id]
        if state.first_schedule_ns is not None:
            self._departed.append(state.id)

    # Foresight and self-examination.

    def steady_for(self, now_ns: int) -> int:
        """For how many coming steps the decode group alone runs, unchanged but for appended blocks.

        Holds unless something is added, aborted or stopped. 0 whenever that cannot be promised.
        """
        members, by_rule = len(self.group), getattr(self.batching, "steady_for", None)
        if by_rule is None or not members or self.prefilling or self.stalled or self.draining:
            return 0
        # Any window of m * block_size rounds asks m blocks of each member at most.
        by_blocks = self.allocator.num_free_blocks // members * self.limits.block_size
        return max(0, min(by_rule(Step(self, now_ns)), by_blocks, self.group.rounds_to_next_limit()))

    def check(self) -> None:
        """Recompute every invariant from scratch; AssertionError names what is off."""
        check_scheduler(self)
