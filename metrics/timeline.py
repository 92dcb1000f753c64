"""The state of a run over time: for how long each step's state held, means, and means per time bin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedserve.metrics.record import RecordError, RunRecord
from pagedserve.metrics.tokens import NS_PER_S


@dataclass(frozen=True, slots=True)
class Timeline:
    """One segment a step, in order, not overlapping: the step's state held over ``[start_ns, end_ns)``.

    What lies between two segments is idle time: every quantity is zero there.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray

    @property
    def duration_s(self) -> float:
        """From the first schedule to the last commit, idle time included; 0 for a run without steps."""
        return float(self.end_ns[-1] - self.start_ns[0]) / NS_PER_S if self.start_ns.size else 0.0

    def integral(self, values: np.ndarray) -> float:
        """Sum over segments of value x seconds. ``values``: one a step."""
        # In float: slots x nanoseconds of one day already overflow int64.
        return float(np.sum(values * ((self.end_ns - self.start_ns) / NS_PER_S)))

    def mean(self, values: np.ndarray) -> float:
        """Time-weighted mean of ``values`` (one a step) over the whole run; NaN if it took no time."""
        return self.integral(values) / self.duration_s if self.duration_s else float("nan")

    def edges(self, num_bins: int) -> np.ndarray:
        """Edges, int64, of ``num_bins`` equal bins from the first schedule to the last commit."""
        if not self.start_ns.size:
            return np.zeros(num_bins + 1, np.int64)
        span = int(self.end_ns[-1] - self.start_ns[0])
        return self.start_ns[0] + np.array([span * i // num_bins for i in range(num_bins + 1)], np.int64)

    def binned(self, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Integral of ``values`` (one a step) over each bin of ``edges``, in value x seconds."""
        if not self.start_ns.size:
            return np.zeros(edges.size - 1)
        origin = self.start_ns[0]
        length = (self.end_ns - self.start_ns) / NS_PER_S
        total = np.concatenate(([0.0], np.cumsum(values * length)))
        # The running integral rises along a segment and is flat from its end to the next start.
        knots = np.stack((self.start_ns - origin, self.end_ns - origin), axis=1).ravel()
        heights = np.stack((total[:-1], total[1:]), axis=1).ravel()
        return np.diff(np.interp(edges - origin, knots, heights))


def step_timeline(record: RunRecord) -> Timeline:
    """For how long the state of each step of ``record`` held.

    A step's state holds from its ``schedule_ns`` to the next step's: while it waits for launch, runs, and
    while the host works afterwards, because requests keep their blocks through the gap. That is so at
    overlap depth 0 (next schedule after this commit) and 1 (before it). The last step's holds to its commit.
    If before the next schedule every request that had been scheduled has ended, the state ends with the
    commit, or with the last of those requests if that was later: from there on nothing is held.

    A client sees no state: its segments have no length, and what is asked of them is NaN.
    """
    commit = record.array("steps", "commit_ns")
    schedule = commit if record.is_client else record.array("steps", "schedule_ns")
    for name, times in (("schedule_ns", schedule), ("commit_ns", commit)):
        backward = np.flatnonzero(np.diff(times) < 0)
        if backward.size:
            raise RecordError(f"steps: row {backward[0] + 1}: {name} lies before that of the row above")
    if np.any(commit < schedule):
        raise RecordError(f"steps: row {np.argmax(commit < schedule)}: commit_ns lies before schedule_ns")
    if not schedule.size:
        return Timeline(schedule, commit)
    following = schedule[1:]
    if record.is_client:
        return Timeline(commit, commit)
    admitted_at, ended_at = _admitted_and_ended(record)
    num_admitted = np.searchsorted(admitted_at, following, side="left")
    num_ended = np.searchsorted(ended_at, following, side="left")
    last_end = np.concatenate(([schedule[0]], ended_at))[num_ended]
    idle_from = np.maximum(commit[:-1], last_end)
    end = np.where(num_admitted == num_ended, np.minimum(idle_from, following), following)
    return Timeline(schedule, np.append(end, commit[-1]))


def _admitted_and_ended(record: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Sorted times at which requests were first scheduled, and at which those requests ended."""
    scheduled, was_scheduled = record.nullable_array("requests", "first_schedule_ns")
    finish, has_ended = record.nullable_array("requests", "finish_ns")
    return np.sort(scheduled[was_scheduled]), np.sort(finish[was_scheduled & has_ended])
