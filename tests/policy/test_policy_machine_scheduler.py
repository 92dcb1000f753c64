"""Random lives of a scheduler: any legal call at any time, every invariant checked after every call."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_driver import STEP_NS, Drive
from policy_parts import (
    AdmitBeforeDecode,
    Ageing,
    FewestComputedVictim,
    OldestTwiceVictim,
    ShortestPromptFirst,
    SmallChunks,
    SwapLong,
)
from policy_scripts import Script, scripted

from pagedserve.policy import Limits, Policy, policy
from pagedserve.policy.errors import QueueFull

MAX_STEPS_TO_DRAIN = 3000
BATCHING = ("serial", "static", "prefill_first", "mixed", "mixed", AdmitBeforeDecode(), SmallChunks())
ORDERS = ("fcfs", ShortestPromptFirst(), Ageing())
MODES = ("recompute", "swap", "swap", SwapLong(3))
VICTIMS = ("newest", OldestTwiceVictim(), FewestComputedVictim())


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Tiny limits: pools of a few blocks, budgets of a few tokens."""
    num_seqs = draw(st.integers(1, 4))
    return Limits(
        max_num_batched_tokens=draw(st.integers(num_seqs, 12)),
        max_num_seqs=num_seqs,
        max_model_len=draw(st.integers(4, 24)),
        block_size=draw(st.sampled_from((1, 2, 3, 4))),
        num_blocks=draw(st.integers(1, 10)),
        max_num_queued_reqs=draw(st.sampled_from((None, None, 3))),
        num_cpu_blocks=draw(st.sampled_from((0, 1, 4, 12))),
    )


@st.composite
def policies(draw: st.DrawFn, within: Limits) -> Policy:
    """Any composition that the limits allow."""
    allocators = ["paged", "paged", "paged", "contiguous_limit"]
    if within.num_slots >= within.max_model_len:
        allocators.append("contiguous_max")
    allocator = draw(st.sampled_from(allocators))
    return policy(
        "mixed",
        batching=draw(st.sampled_from(BATCHING)),
        order=draw(st.sampled_from(ORDERS)),
        victim=draw(st.sampled_from(VICTIMS)),
        allocator=allocator,
        watermark=draw(st.sampled_from((0.0, 0.1, 0.5))),
        scheduler_reserve_full_isl=draw(st.booleans()),
        enable_prefix_caching=allocator == "paged" and draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(MODES if within.num_cpu_blocks else ("recompute",))),
    )


@st.composite
def scripts(draw: st.DrawFn, request: int, within: Limits, cached: bool, now_ns: int) -> Script:
    """A request that can run, often with a prefix in common with others."""
    prompt = draw(st.integers(1, min(within.max_model_len - 1, within.num_slots)))
    max_tokens = draw(st.integers(1, 10))
    return scripted(
        request,
        prompt,
        max_tokens,
        arrival_ns=now_ns,
        stop_after=draw(st.none() | st.integers(1, max_tokens)),
        family=draw(st.integers(0, 1)),
        shared=draw(st.integers(0, prompt + max_tokens)),
        block_size=within.block_size if cached and draw(st.integers(0, 3)) else None,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, schedules and commits in any order that overlap allows."""

    drive: Drive

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Draw limits, a policy within them and an overlap depth."""
        self.num_added = 0
        self.broken = False
        within = data.draw(limits())
        self.drive = Drive(data.draw(policies(within)), within, data.draw(st.integers(0, 1)))

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        """A request arrives."""
        drive = self.drive
        cached = drive.policy.enable_prefix_caching
        script = data.draw(scripts(self.num_added, drive.limits, cached, drive.now_ns))
        self.num_added += 1
        try:
            self._do(lambda: drive.add(script))
        except QueueFull:
            self.broken = False
            bound = drive.limits.max_num_queued_reqs
            assert bound is not None
            assert len(drive.live) >= bound

    @precondition(lambda self: self.num_added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A request is aborted, be it live, ended or refused."""
        request = data.draw(st.integers(0, self.num_added))
        self._do(lambda: self.drive.abort(request))

    @precondition(lambda self: len(self.drive.in_flight) <= self.drive.depth)
    @rule()
    def schedule(self) -> None:
        """A step is planned; it may be asked for again when the plan was empty."""
        self._do(self.drive.schedule)

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def commit(self) -> None:
        """The oldest step in flight is done."""
        self.drive.now_ns += STEP_NS
        self._do(self.drive.commit)

    def _do(self, verb: Callable[[], object]) -> None:
        """After an exception the machine is broken: draining it would only hide the cause."""
        self.broken = True
        verb()
        self.broken = False

    @invariant()
    def capacity(self) -> None:
        """What an allocator reports adds up."""
        if not hasattr(self, "drive"):
            return
        allocator, within = self.drive.scheduler.allocator, self.drive.limits
        used = within.num_blocks - allocator.num_free_blocks
        assert 0 <= allocator.num_cached_blocks <= allocator.num_free_blocks <= within.num_blocks
        assert 0 <= allocator.num_quarantined_blocks <= used
        assert 0 <= self.drive.scheduler.num_wasted_slots <= used * within.block_size

    def teardown(self) -> None:
        """CASES A5: whatever happened, everything drains."""
        if hasattr(self, "drive") and not self.broken:
            drain(self.drive)


def drain(drive: Drive) -> None:
    """Run to the end in DESIGN's order of calls."""
    for _ in range(MAX_STEPS_TO_DRAIN):
        while len(drive.in_flight) > drive.depth:
            drive.commit()
        drive.now_ns += STEP_NS
        if drive.schedule():
            continue
        if not drive.in_flight:
            break
        drive.commit()
    else:
        pytest.fail(f"no end after {MAX_STEPS_TO_DRAIN} steps: {sorted(drive.live)} still live")
    drive.check_drained()


# No deadline: nothing here is timed. The short run is the same every time, the long one looks further.
SHORT = settings(
    deadline=None, report_multiple_bugs=False, derandomize=True, max_examples=150, stateful_step_count=50
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SHORT


class DeepMachine(SchedulerMachine):
    """The same, longer."""


TestSchedulerDeep = pytest.mark.timeout(3600)(pytest.mark.long(DeepMachine.TestCase))
TestSchedulerDeep.settings = settings(SHORT, derandomize=False, max_examples=4000, stateful_step_count=80)
