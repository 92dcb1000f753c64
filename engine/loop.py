"""The engine's loop: policy plus a device. Free of torch; the runner owns the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from pagedserve.policy import Finished, Outcome, Request, RequestRefused, RequestState, Scheduler, StepPlan


class Runner(Protocol):
    """Executes plans in the order given."""

    def can_launch_ahead(self, plan: StepPlan) -> bool:
        """Whether this plan, the next to be launched, can be while the step before has not been waited for."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step; may return before it is done."""
        ...

    def wait(self) -> Sequence[Outcome]:
        """Wait for the oldest launched step and return its outcomes."""
        ...


class LoopObserver(Protocol):
    """What the loop tells of its verbs, each right after it, with the same ``now_ns``; a `Recorder` is one.

    ``launched`` tells when the device may have begun the step: when it was handed over, or, if the one before was
    still in flight then, when that was committed. So a device has one step at a time, a step's time is that
    from ``launched`` to ``committed``, and what lies between two steps is the host's.
    """

    def added(self, state: RequestState, due_ns: int, now_ns: int) -> None: ...
    def refused(self, request: Request, due_ns: int, now_ns: int, error: str) -> None: ...
    def aborted(self, request: int, now_ns: int, reason: str = "abort") -> None: ...
    def scheduled(self, plan: StepPlan, now_ns: int) -> None: ...
    def launched(self, now_ns: int) -> None: ...
    def committed(
        self, step: int, outcomes: Sequence[Outcome], finished: list[Finished], now_ns: int
    ) -> None: ...


class NoRecorder:
    """Takes a `Recorder`'s calls and keeps nothing."""

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""

    added = refused = aborted = scheduled = launched = committed = _ignore


class EngineLoop:
    """Intake, schedule, launch, wait, commit, at overlap depth 0 or 1.

    At depth 1 a step is scheduled while the one before runs, and launched before that is waited for if the
    runner can do so, behind its commit otherwise. The order of the scheduler's verbs is the same either way.

    ``add`` and ``abort`` may be called from any thread; they take effect at the next `step`, in the order in
    which they were called. All times come from ``clock`` (monotonic ns), made strictly increasing, so that the
    order of a record's calls is the order of their times.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        recorder: LoopObserver,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.scheduler = scheduler
        self.unhook()
        self._runner = runner
        self.recorder = recorder
        self.clock = clock
        self._last_ns = -1
        # Adds and aborts share a queue, so that an abort right behind an add finds its request.
        self._intake: deque[Callable[[], None]] = deque()
        self._in_flight: deque[StepPlan] = deque()
        self._blocked = False
        self.wake_ns: int | None = None

    def unhook(self) -> None:
        """Forget the hooks, and so whoever set them: until then the two hold each other in memory."""
        # Called in the thread of `step`, in the order of events.
        self.on_added: Callable[[RequestState], None] = lambda state: None
        self.on_commit: Callable[[list[Finished]], None] = lambda finished: None
        self.on_abort: Callable[[int, str], None] = lambda request, reason: None
        self.on_refused: Callable[[Request, RequestRefused], None] = lambda request, error: None

    def now_ns(self) -> int:
        """The time of the next verb: later than any before."""
        self._last_ns = max(self.clock(), self._last_ns + 1)
        return self._last_ns

    @property
    def last_ns(self) -> int:
        """The time of the last verb: in a hook, of the one that it is about."""
        return self._last_ns

    def add(self, request: Request, due_ns: int | None = None) -> None:
        """Hand a request in; ``due_ns`` is when it was planned to be sent, by default its arrival."""
        due_ns = request.arrival_ns if due_ns is None else due_ns
        self._intake.append(partial(self._add, request, due_ns))

    def abort(self, request: int, reason: str = "abort") -> None:
        """Ask for a request's end; nothing happens if it has ended."""
        self._intake.append(partial(self._abort, request, reason))

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything: intake, live requests or a step in flight."""
        return bool(self._intake or self._in_flight or self.scheduler.has_work)

    @property
    def is_ready(self) -> bool:
        """Whether a step would do something now, rather than find that nothing can be scheduled."""
        may_schedule = self.scheduler.has_work and (not self._blocked or self._wake_is_due())
        return bool(self._intake or self._in_flight or may_schedule)

    def _wake_is_due(self) -> bool:
        return self.wake_ns is not None and self.clock() >= self.wake_ns

    def step(self) -> bool:
        """One turn; False when nothing can be done now: the caller may sleep.

        It may sleep until something is handed in, or until ``wake_ns`` if the policy named a time.
        """
        if self._take_intake() or self._wake_is_due():
            self._blocked = False
        plan = None
        if not self.scheduler.has_work:
            self.wake_ns = None
        elif not self._blocked:
            plan = self._schedule()
        if self._in_flight:
            if plan is not None and self._runner.can_launch_ahead(plan):
                self._launch(plan)
                plan = None
            self._commit()
        elif plan is None:
            # Asking again would give the same answer until something changes.
            self._blocked = True
            return False
        if plan is not None:
            self._launch(plan)
            self.recorder.launched(self.now_ns())
            if self.scheduler.overlap_depth == 0:
                self._commit()
        return True

    def _take_intake(self) -> bool:
        """Apply what was handed in; False if there was nothing."""
        if not self._intake:
            return False
        while self._intake:
            self._intake.popleft()()
        return True

    def _add(self, request: Request, due_ns: int) -> None:
        now_ns = self.now_ns()
        try:
            state = self.scheduler.add(request, now_ns)
        except RequestRefused as error:
            self.recorder.refused(request, due_ns, now_ns, str(error))
            self.on_refused(request, error)
        else:
            self.recorder.added(state, due_ns, now_ns)
            self.on_added(state)

    def _abort(self, request: int, reason: str) -> None:
        now_ns = self.now_ns()
        alive = self.scheduler.abort(request, now_ns)
        self.recorder.aborted(request, now_ns, reason)
        if alive:
            self.on_abort(request, reason)

    def _schedule(self) -> StepPlan | None:
        now_ns = self.now_ns()
        plan = self.scheduler.schedule(now_ns)
        self.recorder.scheduled(plan, now_ns)
        self.wake_ns = plan.wake_ns
        return plan if plan else None

    def _launch(self, plan: StepPlan) -> None:
        self._runner.launch(plan)
        self._in_flight.append(plan)

    def _commit(self) -> None:
        plan = self._in_flight.popleft()
        outcomes = self._runner.wait()
        now_ns = self.now_ns()
        assert plan.step is not None
        finished = self.scheduler.commit(plan.step, outcomes, now_ns)
        self.recorder.committed(plan.step, outcomes, finished, now_ns)
        if self._in_flight:
            self.recorder.launched(now_ns)  # the step handed over meanwhile is the device's next
        self.on_commit(finished)
