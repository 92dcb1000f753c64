"""One simulated serving process: policy plus a clock, with the same four verbs as the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy
from simpy.events import AnyOf, Event

from pagedserve.metrics.recorder import Recorder
from pagedserve.policy import Finished, Request, RequestRefused, Scheduler, StepPlan
from pagedserve.simulator.clock import COMMIT, SCHEDULE, At, instant_is_over
from pagedserve.simulator.outcomes import TrueLengths
from pagedserve.simulator.timing import Timing


@dataclass(slots=True)
class LaunchedState:
    """The step on the device."""

    plan: StepPlan
    commit_ns: int


class Replica:
    """Schedules, waits for the time a step takes, commits; at overlap depth 1 schedules ahead.

    ``run`` is the SimPy process. ``on_end`` hears of every request that ends, in any way.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        timing: Timing,
        outcomes: TrueLengths,
        recorder: Recorder,
        check: bool = False,
    ) -> None:
        self._env = env
        self.scheduler = scheduler
        self._timing = timing
        self._outcomes = outcomes
        self._recorder = recorder
        self._check = check
        self._woken: Event | None = None
        self.on_end: Callable[[int], None] = lambda request: None

    def add(self, request: Request, due_ns: int) -> None:
        """The scheduler's ``add``, now; a refusal is recorded."""
        now_ns = int(self._env.now)
        try:
            state = self.scheduler.add(request, now_ns)
        except RequestRefused as error:
            self._recorder.refused(request, due_ns, now_ns, str(error))
            self.on_end(request.id)
        else:
            self._recorder.added(state, due_ns, now_ns)
        self._examine()
        self._wake()

    def abort(self, request: int, reason: str) -> None:
        """The scheduler's ``abort``, now; without effect on a request that has ended."""
        now_ns = int(self._env.now)
        alive = self.scheduler.abort(request, now_ns)
        self._recorder.aborted(request, now_ns, reason)
        self._examine()
        self._wake()
        if alive:
            self.on_end(request)

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.triggered:
            self._woken.succeed()

    def run(self) -> Generator[Event, Any, None]:
        """The SimPy process; it ends with the simulation, when no event is left."""
        env, overlaps = self._env, self.scheduler.overlap_depth > 0
        flight: LaunchedState | None = None
        while True:
            plan, schedule_ns, handed_ns = None, int(env.now), 0
            # With a step in flight and nothing left, a recorded run may still have taken something in.
            if self.scheduler.has_work or flight is not None:
                schedule_ns = self._timing.schedule_ns(int(env.now))
                # A recorded run in which the work in hand was aborted schedules only after the commit.
                if flight is None or schedule_ns <= flight.commit_ns:
                    if schedule_ns > env.now or not instant_is_over(env):
                        yield At(env, schedule_ns, SCHEDULE)
                    plan = self._schedule() if self.scheduler.has_work else None
            if plan:
                handed_ns = self._timing.handed_ns(plan, schedule_ns)
            if flight is not None:
                yield At(env, max(flight.commit_ns, handed_ns), COMMIT)
                self._commit(flight.plan)
                flight = None
            elif not plan:
                self._woken = Event(env)
                wake_ns = None if plan is None else plan.wake_ns
                again = [] if wake_ns is None else [At(env, max(wake_ns, int(env.now)), SCHEDULE)]
                yield AnyOf(env, [self._woken, *again])
            if plan:
                launch_ns = self._timing.launch_ns(plan, handed_ns, int(env.now))
                self._recorder.launched(launch_ns)
                flight = LaunchedState(plan, self._timing.commit_ns(plan, launch_ns))
                if overlaps:
                    yield At(env, launch_ns, COMMIT)
                else:
                    yield At(env, flight.commit_ns, COMMIT)
                    self._commit(plan)
                    flight = None

    def _schedule(self) -> StepPlan:
        now_ns = int(self._env.now)
        plan = self.scheduler.schedule(now_ns)
        self._recorder.scheduled(plan, now_ns)
        self._examine()
        return plan

    def _commit(self, plan: StepPlan) -> None:
        assert plan.step is not None
        now_ns, outcomes = int(self._env.now), self._outcomes.of(plan)
        finished: list[Finished] = self.scheduler.commit(plan.step, outcomes, now_ns)
        self._recorder.committed(plan.step, outcomes, finished, now_ns)
        self._examine()
        for end in finished:
            self.on_end(end.request)

    def _examine(self) -> None:
        if self._check:
            self.scheduler.check()
