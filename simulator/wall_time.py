"""Steps of a modelled device in real time: each ends when the cost model says, on a clock that passes by itself.

The times aimed at are those of `Replica` with `ModelledTimes`: a step is planned at once when there is something
to do, launched after its host time, and over after its step time; at overlap depth 1 the host works while the
step before runs. They are absolute, so that neither the work of our own loop nor a late awakening adds up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from pagedserve.policy.plan import StepShape
from pagedserve.simulator.cost import CostModel

COARSE_NS = 2_000_000
"""From here on sleeps are short: an event's wait may be late by more than a plain sleep is."""


class WallClock(Protocol):
    """Integer nanoseconds that pass, and a way to let them."""

    def now_ns(self) -> int:
        """The time now."""
        ...

    def sleep_until(self, at_ns: int) -> None:
        """Return at ``at_ns`` or soon after, at once if that is past or after `stop`."""
        ...

    def stop(self) -> None:
        """From any thread: end all sleeps, now and in future."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. A sleep uses no processor time and is late by what the system is."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def now_ns(self) -> int:
        """See `WallClock.now_ns`."""
        return time.monotonic_ns()

    def sleep_until(self, at_ns: int) -> None:
        """See `WallClock.sleep_until`."""
        while not self._stopped.is_set() and (left_ns := at_ns - time.monotonic_ns()) > 0:
            if left_ns > COARSE_NS:
                self._stopped.wait((left_ns - COARSE_NS // 2) / 1e9)
            else:
                time.sleep(left_ns / 1e9)

    def stop(self) -> None:
        """See `WallClock.stop`."""
        self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        """See `WallClock.is_stopped`."""
        return self._stopped.is_set()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was handed over: when it was to be, whether that was missed, and how long the device takes."""

    handed_ns: int
    is_late: bool
    step_ns: int


class WallTimeState:
    """When the steps of one engine happen, and how late they were.

    It is told what the engine's loop does, in that order; `launch` and `wait` sleep until it is time. A step
    whose time is past when it is waited for is late, and what follows counts from its real end: no step is made
    shorter to catch up. One that ends before its time, because the clock was stopped, is cut.
    """

    def __init__(self, cost: CostModel, clock: WallClock | None = None) -> None:
        self.cost = cost
        self.clock = clock or MonotonicClock()
        self.num_steps = self.num_late_steps = self.num_cut_steps = 0
        # From when steps should have been over to when they were, awakenings included.
        self.late_ns = self.max_late_ns = 0
        # When the last launch or commit was to happen; when it did, if it was missed.
        self._last_ns = 0
        # Since when there is something to plan; None: nothing since then, as far as is known.
        self._ready_ns: int | None = None
        self._schedule_ns: int | None = None
        self._free_ns = 0
        self._launched: deque[_Launched] = deque()

    def arrived(self, at_ns: int) -> None:
        """Something was handed in; where nothing was left to do, the next step can be planned from then on."""
        if self._ready_ns is None:
            self._ready_ns = max(self._last_ns, at_ns)

    def planned(self, at_ns: int) -> None:
        """A step was planned at ``at_ns``; the model's host had begun when there was something to plan."""
        self._schedule_ns = at_ns if self._ready_ns is None else self._ready_ns
        self._ready_ns = None

    def not_planned(self) -> None:
        """The policy planned nothing: it waits for what comes next."""
        self._ready_ns = None

    def may_plan(self, has_work: bool) -> None:
        """A step was launched or committed just now. ``has_work``: something is left to plan."""
        if self._schedule_ns is None:
            self._ready_ns = self._last_ns if has_work else None

    def launch(self, shape: StepShape) -> None:
        """Return when the step planned last is to be handed to the device, on which one may run still."""
        assert self._schedule_ns is not None, "a step is launched that was not planned"
        handed_ns = self._schedule_ns + self.cost.host_ns(shape)
        if not self._launched:
            handed_ns = max(self._free_ns, handed_ns)
        self._schedule_ns = None
        is_late = self.clock.now_ns() > handed_ns
        self._launched.append(_Launched(handed_ns, is_late, self.cost.step_ns(shape)))
        self._last_ns = handed_ns
        self.clock.sleep_until(handed_ns)

    def wait(self) -> None:
        """Return when the oldest step launched is over, and the next is launched if it was meanwhile."""
        step = self._launched.popleft()
        end_ns = max(self._free_ns, step.handed_ns) + step.step_ns
        now_ns = self.clock.now_ns()
        if self._launched and self._launched[0].handed_ns > end_ns:
            end_ns, is_late = self._launched[0].handed_ns, self._launched[0].is_late
        else:
            is_late = now_ns > end_ns
        if now_ns < end_ns:
            self.clock.sleep_until(end_ns)
            now_ns = self.clock.now_ns()
        is_cut = now_ns < end_ns
        self.num_steps += 1
        self.num_late_steps += is_late
        self.num_cut_steps += is_cut
        late_ns = max(0, now_ns - end_ns)
        self.late_ns += late_ns
        self.max_late_ns = max(self.max_late_ns, late_ns)
        self._free_ns = self._last_ns = now_ns if is_late or is_cut else end_ns
