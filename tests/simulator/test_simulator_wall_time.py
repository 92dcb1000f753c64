"""Steps in wall time, on a clock of the test's own: exact nanoseconds, and what lateness does to them."""

from __future__ import annotations

import threading
import time

import pytest

from pagedserve.policy import StepShape
from pagedserve.simulator import wall_time
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.wall_time import MonotonicClock, WallTimeState

STEP, HOST = 1_000, 100
COST = ConstantCost(STEP, host_base_ns=HOST)
SHAPE = StepShape((), 1, 10, 10, 100, 1)


class FakeClock:
    """Passes when told to, and in sleeps; ``awakening_ns`` is by how much each sleep is too long."""

    def __init__(self, awakening_ns: int = 0) -> None:
        self.now, self.awakening_ns, self.is_stopped = 0, awakening_ns, False
        self.slept_until: list[int] = []

    def now_ns(self) -> int:
        return self.now

    def sleep_until(self, at_ns: int) -> None:
        self.slept_until.append(at_ns)
        if not self.is_stopped and at_ns > self.now:
            self.now = at_ns + self.awakening_ns

    def stop(self) -> None:
        self.is_stopped = True


def wall_of(cost: ConstantCost = COST, awakening_ns: int = 0) -> tuple[WallTimeState, FakeClock]:
    clock = FakeClock(awakening_ns)
    return WallTimeState(cost, clock), clock


def one_step(wall: WallTimeState, clock: FakeClock, *, goes_on: bool, work_ns: int = 0) -> tuple[int, int]:
    """A step at overlap depth 0 whose own loop works ``work_ns`` before its launch; its launch and its end."""
    wall.planned(clock.now)
    clock.now += work_ns
    wall.launch(SHAPE)
    launch = clock.now
    wall.may_plan(True)
    wall.wait()
    end = clock.now
    wall.may_plan(goes_on)
    return launch, end


def test_steps_follow_each_other_after_host_time_and_step_time() -> None:
    wall, clock = wall_of()
    wall.arrived(50)
    clock.now = 50
    assert one_step(wall, clock, goes_on=True) == (150, 1_150)
    assert one_step(wall, clock, goes_on=True) == (1_250, 2_250)
    assert (wall.num_steps, wall.num_late_steps, wall.late_ns) == (2, 0, 0)


@pytest.mark.parametrize("work_ns", [1, 99, 100, 500, 1_100])
def test_the_loops_own_work_is_hidden_in_the_steps_time(work_ns: int) -> None:
    """It may take the host's time and the step's: the ends stay where the model has them."""
    wall, clock = wall_of()
    wall.arrived(0)
    ends = [one_step(wall, clock, goes_on=True, work_ns=work_ns)[1] for _ in range(5)]
    assert ends == [1_100 * count for count in range(1, 6)]
    assert (wall.num_late_steps, wall.max_late_ns) == (0, 0)


def test_awakenings_that_are_late_do_not_add_up() -> None:
    wall, clock = wall_of(awakening_ns=7)
    wall.arrived(0)
    ends = [one_step(wall, clock, goes_on=True)[1] for _ in range(5)]
    assert ends == [1_100 * count + 7 for count in range(1, 6)]
    assert (wall.num_late_steps, wall.late_ns, wall.max_late_ns) == (0, 35, 7)


def test_a_late_step_is_counted_and_the_next_one_is_not_made_shorter() -> None:
    wall, clock = wall_of()
    wall.arrived(0)
    assert one_step(wall, clock, goes_on=True, work_ns=1_500)[1] == 1_500
    assert one_step(wall, clock, goes_on=True)[1] == 1_500 + 1_100
    assert (wall.num_steps, wall.num_late_steps, wall.late_ns, wall.max_late_ns) == (2, 1, 400, 400)


def test_after_a_rest_time_counts_from_the_arrival() -> None:
    wall, clock = wall_of()
    wall.arrived(0)
    one_step(wall, clock, goes_on=False)
    clock.now = 5_030
    wall.arrived(5_000)  # handed in 30 ns before the loop looked
    wall.arrived(5_010)
    assert one_step(wall, clock, goes_on=False) == (5_100, 6_100)


def test_what_arrived_during_the_last_step_is_planned_at_its_end() -> None:
    wall, clock = wall_of()
    wall.arrived(0)
    one_step(wall, clock, goes_on=False)
    clock.now = 1_120
    wall.arrived(700)
    assert one_step(wall, clock, goes_on=False) == (1_200, 2_200)


def test_a_policy_that_plans_nothing_has_its_time_counted_from_when_it_does() -> None:
    wall, clock = wall_of()
    wall.arrived(0)
    one_step(wall, clock, goes_on=True)
    wall.not_planned()
    clock.now = 9_000
    assert one_step(wall, clock, goes_on=False) == (9_100, 10_100)


@pytest.mark.parametrize(("host_ns", "ends"), [(100, [1_100, 2_100, 3_100]), (1_300, [2_300, 3_600, 4_900])])
def test_at_depth_1_the_host_works_while_the_step_before_runs(host_ns: int, ends: list[int]) -> None:
    """commit(k+1) = max(commit(k), launch(k) + host) + step."""
    wall, clock = wall_of(ConstantCost(STEP, host_base_ns=host_ns))
    wall.arrived(0)
    wall.planned(0)
    wall.launch(SHAPE)
    found = []
    for _ in ends:
        wall.may_plan(True)
        wall.planned(clock.now)
        wall.wait()
        wall.may_plan(True)  # the next one is planned already
        found.append(clock.now)
        wall.launch(SHAPE)
    assert found == ends


@pytest.mark.parametrize(
    ("host_ns", "commits"), [(100, [1_100, 2_100, 3_100]), (1_300, [2_600, 3_900, 5_200])]
)
@pytest.mark.parametrize("awakening_ns", [0, 7])
def test_a_step_launched_ahead_waits_for_the_device_and_the_host_for_its_launch(
    host_ns: int, commits: list[int], awakening_ns: int
) -> None:
    """commit(k) = max(launch(k) + step, hand-over(k+1)), and the device begins k+1 then."""
    wall, clock = wall_of(ConstantCost(STEP, host_base_ns=host_ns), awakening_ns)
    wall.arrived(0)
    wall.planned(0)
    wall.launch(SHAPE)
    found = []
    for _ in commits:
        wall.may_plan(True)
        wall.planned(clock.now)
        wall.launch(SHAPE)
        wall.wait()
        found.append(clock.now)
    assert found == [at_ns + awakening_ns for at_ns in commits]
    assert (wall.num_steps, wall.num_late_steps) == (3, 0)


def test_a_hand_over_that_is_late_is_a_late_step() -> None:
    """The loop's own work of 2,000 ns exceeds the modelled host's 1,300: what follows counts from there."""
    wall, clock = wall_of(ConstantCost(STEP, host_base_ns=1_300))
    wall.arrived(0)
    wall.planned(0)
    wall.launch(SHAPE)
    wall.may_plan(True)
    wall.planned(clock.now)
    clock.now += 2_000
    wall.launch(SHAPE)
    wall.wait()
    assert (clock.now, wall.num_late_steps, wall.late_ns) == (3_300, 1, 700)
    wall.wait()
    assert (clock.now, wall.num_late_steps) == (4_300, 1)


def test_a_stopped_clock_ends_steps_at_once_and_they_are_counted_as_cut() -> None:
    wall, clock = wall_of()
    wall.arrived(0)
    one_step(wall, clock, goes_on=True)
    clock.stop()
    assert one_step(wall, clock, goes_on=False) == (1_100, 1_100)
    assert (wall.num_steps, wall.num_cut_steps, wall.num_late_steps) == (2, 1, 0)


def test_the_monotonic_clock_sleeps_to_the_time_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleep, sleeps = MonotonicClock(), time.sleep, []

    def counted(seconds: float) -> None:
        sleeps.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(wall_time.time, "sleep", counted)
    for sleep_ns in (-1, 0, 300_000, 30_000_000):
        at_ns = clock.now_ns() + sleep_ns
        sleeps.clear()
        clock.sleep_until(at_ns)
        assert clock.now_ns() >= at_ns
        assert len(sleeps) <= 3


def test_the_monotonic_clock_is_woken_from_another_thread() -> None:
    clock = MonotonicClock()
    sleeper = threading.Thread(target=clock.sleep_until, args=(clock.now_ns() + 3_600 * 10**9,))
    sleeper.start()
    clock.stop()
    sleeper.join(30)
    assert not sleeper.is_alive()
    assert clock.is_stopped
    clock.sleep_until(clock.now_ns() + 3_600 * 10**9)  # from now on at once
