"""Preemption by swapping: KV goes to host memory and comes back; the mirror follows what every slot holds."""

import dataclasses

import pytest
from policy_driver import STEP_NS, Drive, swaps_of
from policy_parts import PreemptAt, SwapLong
from policy_scripts import Script, crowd, scripted

from pagedserve.policy import Limits, Policy, Scheduler, Step, Swap, policy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PROMPT, OUTPUTS = 6, 9


def limits(num_blocks: int = 24, num_cpu_blocks: int = 24, num_tokens: int = 16) -> Limits:
    """Room for all, unless a test takes it away."""
    return Limits(
        num_tokens, 4, max_model_len=48, block_size=2, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks
    )


def swapping(batching: object = "mixed", **changes: object) -> Policy:
    """A policy that swaps and admits as soon as it can."""
    return policy("mixed", batching=batching, preemption_mode="swap", watermark=0.0, **changes)


def company(block_size: int | None = None, stop_after: int | None = None) -> list[Script]:
    """Request 0, which is preempted, and two neighbours."""
    return [
        scripted(0, PROMPT, OUTPUTS, stop_after=stop_after, block_size=block_size),
        scripted(1, 5, 12, block_size=block_size),
        scripted(2, 3, 14, arrival_ns=20, stop_after=6, block_size=block_size),
    ]


@DEPTHS
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("stop_after", [None, 7])
@pytest.mark.parametrize("outputs", range(OUTPUTS))
def test_nothing_is_computed_again_wherever_the_preemption_falls(
    depth: int, cached: bool, stop_after: int | None, outputs: int
) -> None:
    """CASES B2, with the KV brought back: tokens equal the undisturbed run."""
    scripts = company(2 if cached else None, stop_after)
    calm = Drive(swapping(enable_prefix_caching=cached), limits(), depth)
    calm.run(scripts)
    drive = Drive(swapping(PreemptAt(0, outputs), enable_prefix_caching=cached), limits(num_tokens=4), depth)
    drive.run(scripts)
    assert drive.ended == calm.ended
    assert drive.num_recomputed == drive.states[0].num_recomputed_tokens == 0
    out, back = swaps_of(drive.plans, "swapped_out"), swaps_of(drive.plans, "swapped_in")
    if outputs and outputs + depth < (stop_after or OUTPUTS):
        assert [swap.request for swap in out] == [0]
        # The last token sampled has no KV yet; one more was in flight at depth 1.
        assert 2 * len(out[0].blocks) - (PROMPT + outputs - 1) in (0, 1)
        assert cached or [swap.host_blocks for swap in back] == [out[0].host_blocks]


@pytest.mark.parametrize("rule", ["static", "prefill_first", "mixed"])
@DEPTHS
def test_pressure_changes_no_count(rule: str, depth: int) -> None:
    calm = Drive(swapping(rule), limits(num_blocks=64), depth)
    calm.run(crowd())
    drive = Drive(swapping(rule), limits(num_blocks=9), depth)
    drive.run(crowd())
    assert drive.ended == calm.ended
    assert drive.scheduler.num_preemptions > 0
    assert drive.num_recomputed == 0
    assert swaps_of(drive.plans, "swapped_in")


def test_the_shape_counts_the_blocks_and_the_chunk_starts_behind_them() -> None:
    drive = Drive(swapping(PreemptAt(0, 3)), limits())
    drive.run(company())
    out = next(plan for plan in drive.plans if plan.swapped_out)
    back = next(plan for plan in drive.plans if plan.swapped_in)
    assert out.preempted == (0,)
    assert (out.shape.num_blocks_swapped_out, out.shape.num_blocks_swapped_in) == (4, 0)
    assert (back.shape.num_blocks_swapped_out, back.shape.num_blocks_swapped_in) == (0, 4)
    assert [chunk for chunk in back.chunks if chunk.request == 0] == [(0, PROMPT + 2, 1, True)]
    assert back.num_prefix_hit_tokens == 0


@DEPTHS
def test_without_room_on_the_host_tokens_are_computed_again(depth: int) -> None:
    drive = Drive(swapping(), limits(num_blocks=9, num_cpu_blocks=3), depth)
    drive.run(crowd())
    calm = Drive(swapping(), limits(num_blocks=64), depth)
    calm.run(crowd())
    assert drive.ended == calm.ended
    assert drive.num_recomputed > 0


def test_a_mode_of_ones_own_decides_for_each_victim() -> None:
    own = policy("mixed", preemption_mode=SwapLong(7), watermark=0.0)
    drive = Drive(own, limits(num_blocks=9), 0)
    drive.run(crowd())
    assert drive.num_recomputed > 0
    out = swaps_of(drive.plans, "swapped_out")
    assert out
    assert all(len(swap.blocks) >= 4 for swap in out)


def test_a_mode_that_asks_for_more_than_there_is_gets_recomputation() -> None:
    own = policy("mixed", preemption_mode=SwapLong(0), watermark=0.0)
    drive = Drive(own, limits(num_blocks=9, num_cpu_blocks=1), 0)
    drive.run(crowd())
    assert drive.num_recomputed > 0
    assert not swaps_of(drive.plans, "swapped_out")


def test_cached_blocks_are_hit_and_only_the_others_copied_back() -> None:
    """The prompt's blocks stay cached on the device, so only what was generated comes from the host."""
    drive = Drive(swapping(PreemptAt(0, 4), enable_prefix_caching=True), limits())
    drive.run(company(block_size=2))
    (out,) = swaps_of(drive.plans, "swapped_out")
    back = next(plan for plan in drive.plans if any(c.request == 0 and c.start for c in plan.chunks))
    assert len(out.blocks) == 5
    # Eight of the nine tokens lie in full blocks, all of them cached.
    assert back.num_prefix_hit_tokens == 8
    assert back.swapped_in == (Swap(0, back.new_blocks[0][1][4:5], out.host_blocks[4:]),)


def test_blocks_brought_back_can_be_hit_again() -> None:
    """Their content is as good as computed: another request with the same text finds it."""
    family = {"family": 1, "shared": 20, "block_size": 2}
    drive = Drive(swapping(PreemptAt(0, 2), enable_prefix_caching=True), limits(num_blocks=9))
    # Request 1 evicts what request 0 left cached, all but its first block, and has ended when 0's twin comes.
    twin = scripted(2, 9, 2, arrival_ns=13 * STEP_NS, **family)
    drive.run([scripted(0, 9, 6, **family), scripted(1, 6, 10, block_size=2), twin])
    (back,) = swaps_of(drive.plans, "swapped_in")
    assert len(back.blocks) == 4
    assert drive.states[2].num_prefix_hit_tokens == 8


@DEPTHS
@pytest.mark.parametrize("later", range(5))
def test_an_abort_gives_the_host_blocks_back(depth: int, later: int) -> None:
    """CASES A1, A5: whether the copy is planned, in flight or done."""
    drive = Drive(swapping(), limits(num_blocks=9), depth)
    drive.run(crowd(), aborts=dict.fromkeys(range(1, 4), (4 + later) * STEP_NS + 1))
    assert drive.scheduler.host.num_used_blocks == 0


def test_a_copy_that_was_not_told_of_is_dropped_with_its_request() -> None:
    """An empty plan preempted it; before the next one it is aborted, and its host blocks serve another."""
    drive = Drive(swapping(), limits(num_cpu_blocks=4), 1)
    for script in company():
        drive.add(script)
    drive.schedule()
    drive.scheduler.batching = _PreemptOnly(0)
    assert not drive.schedule()
    assert drive.scheduler.host.num_used_blocks == 3
    drive.abort(0)
    assert drive.scheduler.host.num_used_blocks == 0
    drive.commit()
    drive.scheduler.batching = PreemptAt(1, 1)
    plan = drive.schedule()
    assert [swap.request for swap in plan.swapped_out] == [1]
    drive.run([])


def test_who_is_preempted_by_the_step_that_brings_it_back_stays_on_the_host() -> None:
    drive = Drive(swapping(PreemptAt(0, 2)), limits())
    for script in company():
        drive.add(script)
    state = drive.states[0]
    while not state.host_blocks:
        drive.schedule()
        drive.commit()
    held = state.host_blocks

    class ThinkBetterOfIt:
        """Preempts whom it has just admitted."""

        def compose(self, step: Step) -> None:
            step.decode()
            step.admit_in_order()
            step.preempt(state)

    drive.scheduler.batching = ThinkBetterOfIt()
    assert not drive.schedule().swapped_in
    drive.commit()
    assert (state.host_blocks, state.num_swapped_tokens) == (held, PROMPT + 1)
    drive.scheduler.batching = policy("mixed").part("batching")
    assert [swap.host_blocks for swap in drive.schedule().swapped_in] == [held]
    drive.commit()
    drive.run([])
    assert drive.num_recomputed == 0


@dataclasses.dataclass(slots=True)
class _PreemptOnly:
    """Preempts one request and schedules nothing."""

    request: int

    def compose(self, step: Step) -> None:
        for state in step.running:
            if state.id == self.request:
                step.preempt(state)


def test_a_host_block_freed_by_a_step_is_not_written_by_its_own_copies_out() -> None:
    """Copies out come before copies in: the block would be overwritten before it is read."""
    drive = Drive(swapping(PreemptAt(0, 2)), limits(num_cpu_blocks=4))
    for script in company():
        drive.add(script)
    while not drive.states[0].host_blocks:
        drive.schedule()
        drive.commit()

    class BringBackAndPreempt:
        """Admits request 0, then preempts request 1."""

        def compose(self, step: Step) -> None:
            step.admit_in_order()
            step.preempt(next(state for state in step.running if state.id == 1))

    drive.scheduler.batching = BringBackAndPreempt()
    plan = drive.schedule()
    assert len(plan.swapped_in) == 1
    # Only the block that request 0 had left over is free: request 1 computes its tokens again.
    assert plan.preempted == (1,)
    assert not plan.swapped_out
    drive.commit()
    drive.scheduler.batching = policy("mixed").part("batching")
    drive.run([])


def test_limits_and_modes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_cpu_blocks is -1"):
        Limits(num_cpu_blocks=-1)
    with pytest.raises(ValueError, match="preemption_mode is swap and num_cpu_blocks is 0"):
        Scheduler(policy("mixed", preemption_mode="swap"), Limits())
    with pytest.raises(ValueError, match="unknown preemption_mode 'discard'; choose from recompute, swap"):
        policy("mixed", preemption_mode="discard")
