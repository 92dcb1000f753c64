"""When a replica's verbs happen: computed from a cost model, or read from a record."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from pagedserve.metrics.record import RunRecord
from pagedserve.policy.plan import StepPlan
from pagedserve.simulator.cost import CostModel


class Timing(Protocol):
    """Absolute times in ns, never before the ``ready_ns`` given."""

    def schedule_ns(self, ready_ns: int) -> int:
        """When the next ``schedule`` happens, the replica being ready for it."""
        ...

    def handed_ns(self, plan: StepPlan, schedule_ns: int) -> int:
        """When a plan made at ``schedule_ns`` is handed to the device; a step in flight is waited for after that."""
        ...

    def launch_ns(self, plan: StepPlan, handed_ns: int, ready_ns: int) -> int:
        """When the device begins a plan handed over at ``handed_ns``; at ``ready_ns`` it is free."""
        ...

    def commit_ns(self, plan: StepPlan, launch_ns: int) -> int:
        """When a launched step's outcomes are committed."""
        ...


class ModelledTimes:
    """Schedule at once; hand over after the host time; begin when the step before is over; commit a step time later.

    At overlap depth 1 the engine hands a step over before it waits for the one before. So where the host takes longer
    than the device, tokens are seen when the host comes back for them. Left out: a step that needs its tokens on the
    host first (a grammar, penalties), which is handed over only after that.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def schedule_ns(self, ready_ns: int) -> int:
        """See `Timing.schedule_ns`."""
        return ready_ns

    def handed_ns(self, plan: StepPlan, schedule_ns: int) -> int:
        """See `Timing.handed_ns`: the host works while the step before runs, if the two overlap."""
        return schedule_ns + self._cost.host_ns(plan.shape)

    def launch_ns(self, plan: StepPlan, handed_ns: int, ready_ns: int) -> int:
        """See `Timing.launch_ns`."""
        return max(ready_ns, handed_ns)

    def commit_ns(self, plan: StepPlan, launch_ns: int) -> int:
        """See `Timing.commit_ns`."""
        return launch_ns + self._cost.step_ns(plan.shape)


class RecordedTimes:
    """The times of a past run, call by call and step by step; every call of a live run has its own instant.

    Where the run being simulated has drifted from the record (a time lies in the past, or the record has no
    such step), things happen as soon as possible; the two runs then differ in their plans or times.
    """

    def __init__(self, record: RunRecord) -> None:
        kinds = record.calls.column("kind").to_pylist()
        times = record.calls.column("now_ns").to_pylist()
        self._schedules = [at for kind, at in zip(kinds, times, strict=True) if kind == "schedule"]
        # A call the record does not have comes after all that it has.
        self._end_ns = max(times, default=0) + 1
        self._launch = dict(
            zip(*(record.array("steps", name).tolist() for name in ("step", "launch_ns")), strict=True)
        )
        self._commit = dict(
            zip(*(record.array("steps", name).tolist() for name in ("step", "commit_ns")), strict=True)
        )

    def schedule_ns(self, ready_ns: int) -> int:
        """See `Timing.schedule_ns`."""
        at = bisect_left(self._schedules, ready_ns)
        return max(ready_ns, self._schedules[at] if at < len(self._schedules) else self._end_ns)

    def handed_ns(self, plan: StepPlan, schedule_ns: int) -> int:
        """See `Timing.handed_ns`: a record does not tell, and its commits have waited for it already."""
        return schedule_ns

    def launch_ns(self, plan: StepPlan, handed_ns: int, ready_ns: int) -> int:
        """See `Timing.launch_ns`."""
        assert plan.step is not None
        return max(ready_ns, self._launch.get(plan.step, ready_ns))

    def commit_ns(self, plan: StepPlan, launch_ns: int) -> int:
        """See `Timing.commit_ns`."""
        assert plan.step is not None
        return max(launch_ns, self._commit.get(plan.step, launch_ns))
