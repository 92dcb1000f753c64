import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_hand_records import hand_record

from pagedserve.metrics.record import RecordError, RunRecord
from pagedserve.metrics.timeline import step_timeline


def record_of(
    steps: list[tuple[int, int]], requests: Sequence[tuple[int | None, int | None]], depth: int = 0
) -> RunRecord:
    """Steps as (schedule, commit), requests as (first schedule, finish), all in seconds."""
    second = 10**9

    def ns(time: int | None) -> int | None:
        return None if time is None else time * second

    return hand_record(
        [{"schedule_ns": s * second, "commit_ns": c * second} for s, c in steps],
        [{"request": i, "first_schedule_ns": ns(a), "finish_ns": ns(b)} for i, (a, b) in enumerate(requests)],
        [],
        overlap_depth=depth,
    )


def segments(record: RunRecord) -> list[tuple[float, float]]:
    timeline = step_timeline(record)
    return [(a / 1e9, b / 1e9) for a, b in zip(timeline.start_ns, timeline.end_ns, strict=True)]


HAND = {
    # The request goes on: its blocks are held through the host's gap between steps.
    "host gap": ([(0, 10), (12, 20)], [(0, 20)], 0, [(0, 12), (12, 20)]),
    "true idle": ([(0, 10), (50, 60)], [(0, 10), (50, 60)], 0, [(0, 10), (50, 60)]),
    "one of two goes on": ([(0, 10), (50, 60)], [(0, 10), (0, 60)], 0, [(0, 50), (50, 60)]),
    "unfinished": ([(0, 10), (50, 60)], [(0, None)], 0, [(0, 50), (50, 60)]),
    "aborted within the gap": ([(0, 10), (50, 60)], [(0, 30), (50, 60)], 0, [(0, 30), (50, 60)]),
    "aborted while the step runs": ([(0, 10), (50, 60)], [(0, 4), (50, 60)], 0, [(0, 10), (50, 60)]),
    "refused ones hold nothing": (
        [(0, 10), (50, 60)],
        [(0, 10), (None, 20), (50, 60)],
        0,
        [(0, 10), (50, 60)],
    ),
    "overlap": ([(0, 10), (1, 20), (11, 30)], [(0, 30)], 1, [(0, 1), (1, 11), (11, 30)]),
    # The stop of the only request is seen at 10; step 1 is a discarded row; then nothing until 50.
    "overlap, then idle": ([(0, 10), (1, 20), (50, 60)], [(0, 10), (50, 60)], 1, [(0, 1), (1, 20), (50, 60)]),
    # As before, but the next request is planned while the discarded row still runs.
    "overlap, no idle": ([(0, 10), (1, 20), (12, 30)], [(0, 10), (12, 30)], 1, [(0, 1), (1, 12), (12, 30)]),
    "no step": ([], [(None, None)], 0, []),
}


@pytest.mark.parametrize("case", HAND)
def test_segments_by_hand(case: str) -> None:
    steps, requests, depth, expected = HAND[case]
    assert segments(record_of(steps, requests, depth)) == expected


def test_integral_mean_and_bins_by_hand() -> None:
    record = record_of([(0, 10), (12, 20), (50, 60)], [(0, 20), (50, 60)])
    timeline = step_timeline(record)
    values = np.array([1, 2, 3])
    assert timeline.duration_s == 60
    assert timeline.integral(values) == 12 * 1 + 8 * 2 + 10 * 3
    assert timeline.mean(values) == pytest.approx(58 / 60)
    edges = timeline.edges(4)
    assert (edges / 1e9).tolist() == [0, 15, 30, 45, 60]
    assert timeline.binned(values, edges).tolist() == pytest.approx([12 + 3 * 2, 5 * 2, 0, 10 * 3])


def test_a_run_without_duration_has_no_mean() -> None:
    assert math.isnan(step_timeline(record_of([(5, 5)], [(5, 5)])).mean(np.array([1])))
    empty = step_timeline(record_of([], []))
    assert math.isnan(empty.mean(np.array([])))
    assert empty.binned(np.array([]), empty.edges(3)).tolist() == [0, 0, 0]


def test_a_long_busy_run_does_not_overflow() -> None:
    day = 86_400
    timeline = step_timeline(record_of([(0, day)], [(0, day)]))
    assert timeline.integral(np.array([10**9])) == 10**9 * day


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(10, 20), (5, 30)], "row 1: schedule_ns lies before that of the row above"),
        ([(0, 20), (5, 10)], "row 1: commit_ns lies before that of the row above"),
        ([(0, 10), (20, 15)], "row 1: commit_ns lies before schedule_ns"),
    ],
)
def test_times_that_run_backwards_are_refused(steps: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        step_timeline(record_of(steps, []))


@st.composite
def any_runs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int | None]], int]:
    """Steps at either depth with gaps of any length, requests first scheduled by one of the steps."""
    depth = draw(st.integers(0, 1))
    steps: list[tuple[int, int]] = []
    schedule, commit = 0, 0
    for _ in range(draw(st.integers(1, 6))):
        # At depth 1 a step may be planned while the one before it still runs.
        earliest = schedule if depth else commit
        schedule = draw(st.integers(earliest, commit + 4))
        commit = max(schedule, commit) + draw(st.integers(0, 4))
        steps.append((schedule, commit))
    requests = []
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.sampled_from(steps))[0]
        length = draw(st.none() | st.integers(0, 10))
        requests.append((first, None if length is None else first + length))
    return steps, requests, depth


@given(any_runs(), st.integers(1, 7))
def test_integrals_equal_a_sum_over_ticks(
    run: tuple[list[tuple[int, int]], list[tuple[int, int | None]], int], num_bins: int
) -> None:
    steps, requests, depth = run
    ticks = []
    for i, ((begin, commit), (end, _)) in enumerate(itertools.pairwise([*steps, (steps[-1][1], 0)])):
        for tick in range(begin, end):
            held = any(a < end and (b is None or b > tick) for a, b in requests)
            ticks.append(i + 1 if held or tick < commit else 0)
    timeline = step_timeline(record_of(steps, requests, depth))
    values = np.arange(len(steps)) + 1
    assert timeline.duration_s == len(ticks)
    assert timeline.integral(values) == sum(ticks)
    edges = timeline.edges(num_bins)
    assert timeline.binned(values, edges).sum() == pytest.approx(sum(ticks))
    each = timeline.edges(max(1, len(ticks)))
    assert timeline.binned(values, each).tolist() == pytest.approx(ticks or [0])
