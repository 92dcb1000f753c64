"""A small deterministic engine loop for tests: the four verbs, checked after every call against a mirror."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence

from policy_mirror import Mirror
from policy_scripts import Script, block_key

from pagedserve.policy import Finished, Limits, Outcome, Policy, RequestState, Scheduler, StepPlan, Swap

STEP_NS = 10


class Drive:
    """A scheduler under test. Each verb also calls ``check()`` and updates an independent account.

    The account knows every request's text and so what must come out: which tokens are emitted at which
    step, who ends when and why, and how many tokens are discarded.
    """

    def __init__(self, policy: Policy, limits: Limits, depth: int = 0, content: bool = True) -> None:
        self.policy = policy
        self.limits = limits
        self.depth = depth
        self.scheduler = Scheduler(policy, limits, depth)
        self.mirror = Mirror(limits, policy.enable_prefix_caching, content)
        self.now_ns = 0
        self.states: dict[int, RequestState] = {}
        self.live: dict[int, Script] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.emitted: dict[int, list[int]] = {}
        """Steps that emitted each request's tokens."""
        self.ended: dict[int, Finished] = {}
        self.num_discarded = 0

    # The verbs.

    def add(self, script: Script) -> None:
        """Add a request; it may be refused by the scheduler's errors."""
        self.mirror.scripts[script.id] = script
        self.states[script.id] = self.scheduler.add(script.request, self.now_ns)
        self.live[script.id] = script
        self.emitted[script.id] = []
        self.scheduler.check()

    def abort(self, request: int) -> bool:
        """Abort a request, known or not."""
        known = self.scheduler.abort(request, self.now_ns)
        assert known == (request in self.live), f"abort of {request} says {known}"
        if known:
            del self.live[request]
            self.ended[request] = Finished(request, "abort", len(self.emitted[request]))
            self._check_end(request)
        self.scheduler.check()
        return known

    def schedule(self) -> StepPlan:
        """Schedule; a plan that is not empty goes to the mirror and waits for its commit."""
        plan = self.scheduler.schedule(self.now_ns)
        self.scheduler.check()
        if plan:
            scheduled = {*plan.decodes, *(chunk.request for chunk in plan.chunks)}
            assert scheduled <= self.live.keys(), f"step {plan.step} computes requests that have ended"
            self.mirror.apply(plan)
            self.plans.append(plan)
            self.in_flight.append(plan)
        return plan

    def commit(self) -> list[Finished]:
        """Commit the oldest step in flight with the outcomes that its requests' texts give."""
        plan = self.in_flight.popleft()
        assert plan.step is not None
        sampled = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        keys = self._keys(plan)
        expected: dict[int, Finished] = {}
        outcomes: list[Outcome] = []
        for request in sampled:
            script = self.live.get(request)
            if script is None:
                self.num_discarded += 1
                # A runner does not know that the row is dead, and says what it saw.
                outcomes.append(Outcome(request, 1, "stop", keys.pop(request, ())))
                continue
            self.emitted[request].append(plan.step)
            count = len(self.emitted[request])
            stops = count == script.stop_after
            if count == script.num_outputs(self.limits):
                expected[request] = Finished(request, script.reason(self.limits), count)
            if stops or request in keys:
                outcomes.append(Outcome(request, 1, "stop" if stops else None, keys.get(request, ())))
        outcomes += [Outcome(r, 0, None, given) for r, given in keys.items() if r not in sampled]
        self.mirror.commit(plan.step, {request: len(given) for request, given in keys.items()})
        finished = self.scheduler.commit(plan.step, outcomes, self.now_ns)
        assert {f.request: f for f in finished} == expected, (
            f"step {plan.step} ends {finished}, not {expected}"
        )
        self.ended.update(expected)
        for request in expected:
            del self.live[request]
            self._check_end(request)
        assert self.scheduler.num_discarded_tokens == self.num_discarded
        self.scheduler.check()
        return finished

    def _keys(self, plan: StepPlan) -> dict[int, tuple[Hashable, ...]]:
        """Keys of the blocks that the plan names, by request."""
        keys: dict[int, tuple[Hashable, ...]] = {}
        for request, index in plan.filled:
            key = block_key(self.mirror.scripts[request], index, self.limits.block_size)
            keys[request] = (*keys.get(request, ()), key)
        return keys

    def _check_end(self, request: int) -> None:
        """Facts are untouched and the count is exact, whatever happened on the way (CASES M3, B2)."""
        state, end = self.states[request], self.ended[request]
        assert state.request is self.mirror.scripts[request].request
        assert (state.finish_reason, state.num_output_tokens) == (end.reason, end.num_output_tokens)
        assert not state.block_table

    # The loop.

    def run(
        self, scripts: Iterable[Script], aborts: Mapping[int, int] | None = None, max_steps: int = 2000
    ) -> None:
        """Serve requests at their arrival times, as DESIGN's loop does, until all have ended.

        ``aborts`` maps a request to the time in ns of its abort. Steps end on multiples of ``STEP_NS``. At one
        instant the order is commit, abort, add, schedule. AssertionError after ``max_steps`` steps or when stuck.
        """
        order = sorted(scripts, key=lambda script: script.request.arrival_ns)
        events: list[tuple[int, int, int, Script | int]] = []
        events += [(script.request.arrival_ns, 1, i, script) for i, script in enumerate(order)]
        events += [(at, 0, request, request) for request, at in (aborts or {}).items()]
        todo = deque(sorted(events, key=lambda event: event[:3]))
        while self.in_flight:
            self.commit()
        planned: StepPlan | None = None
        while True:
            self._take_events(todo, self.now_ns)
            # An empty plan made while a step was in flight is asked for again, now that it is committed.
            launched = planned or self.schedule()
            planned = None
            if not launched:
                instants = [todo[0][0]] if todo else []
                instants += [] if launched.wake_ns is None else [launched.wake_ns]
                if not instants:
                    break
                assert min(instants) > self.now_ns, "asked to be woken now, which would never end"
                self.now_ns = min(instants)
                continue
            if self.depth:
                planned = self.schedule()
            end_ns = (self.now_ns // STEP_NS + 1) * STEP_NS
            self._take_events(todo, end_ns - 1)
            self.now_ns = end_ns
            self.commit()
            assert len(self.plans) < max_steps, (
                f"no end after {max_steps} steps: {sorted(self.live)} still live"
            )
        self.check_drained()

    def _take_events(self, todo: deque[tuple[int, int, int, Script | int]], until_ns: int) -> None:
        while todo and todo[0][0] <= until_ns:
            at, _, _, event = todo.popleft()
            self.now_ns = max(self.now_ns, at)
            if isinstance(event, Script):
                self.add(event)
            else:
                self.abort(event)

    def check_drained(self) -> None:
        """CASES A5: nothing is held by anyone, and every request is accounted for."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        assert not self.live, f"requests {sorted(self.live)} never end"
        assert not scheduler.has_work
        assert not self.in_flight
        assert allocator.num_free_blocks == self.limits.num_blocks
        assert allocator.num_quarantined_blocks == 0
        assert allocator.num_live_tokens == 0
        assert scheduler.num_wasted_slots == 0
        assert self.ended.keys() == self.states.keys()
        scheduler.check()

    # What a test looks at.

    @property
    def num_recomputed(self) -> int:
        """Tokens computed again, over all steps."""
        return sum(plan.num_recomputed_tokens for plan in self.plans)

    @property
    def lines(self) -> list[str]:
        """Every plan as a line of text, see `line`."""
        return [line(plan) for plan in self.plans]


def line(plan: StepPlan) -> str:
    """A plan for golden tables: ``chunks | decodes | new blocks | preempted``.

    A chunk is ``request:start+tokens``, with a star if it samples; new blocks are ``request=block,block``.
    """
    chunks = [f"{c.request}:{c.start}+{c.num_tokens}{'*' * c.samples}" for c in plan.chunks]
    blocks = [f"{owner}={','.join(map(str, ids))}" for owner, ids in plan.new_blocks]
    parts = [chunks, [str(r) for r in plan.decodes], blocks, [str(r) for r in plan.preempted]]
    return " | ".join(" ".join(part) or "-" for part in parts)


def swaps_of(plans: Sequence[StepPlan], way: str) -> list[Swap]:
    """All copies ``way`` "swapped_out" or "swapped_in"."""
    return [swap for plan in plans for swap in getattr(plan, way)]
