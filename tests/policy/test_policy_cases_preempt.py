"""CASES B2, F3, F4, M3, M4: what preemption must not change, and what it must show."""

import dataclasses

import pytest
from policy_driver import Drive
from policy_parts import AdmissionsOnly, DecodesOnly, OldestVictim, PreemptAt, ShortestPromptFirst
from policy_scripts import Script, scripted

from pagedserve.policy import Limits, policy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PROMPT, OUTPUTS = 6, 9


def limits(num_blocks: int = 24, num_tokens: int = 16, num_seqs: int = 4) -> Limits:
    """Room for all, unless a test takes it away."""
    return Limits(num_tokens, num_seqs, max_model_len=48, block_size=2, num_blocks=num_blocks)


def company(stop_after: int | None, block_size: int | None) -> list[Script]:
    """Request 0, which is preempted, and two neighbours."""
    return [
        scripted(0, PROMPT, OUTPUTS, stop_after=stop_after, block_size=block_size),
        scripted(1, 5, 12, block_size=block_size),
        scripted(2, 3, 14, arrival_ns=20, stop_after=6, block_size=block_size),
    ]


@DEPTHS
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("stop_after", [None, 7])
@pytest.mark.parametrize("outputs", range(1, OUTPUTS))
def test_b2_preemption_at_every_output_position(
    depth: int, cached: bool, stop_after: int | None, outputs: int
) -> None:
    """CASES B2: tokens equal the undisturbed run, counts are right, the first token comes once."""
    chosen = {"enable_prefix_caching": cached, "watermark": 0.0}
    scripts = company(stop_after, 2 if cached else None)
    calm = Drive(policy("mixed", **chosen), limits(), depth)
    calm.run(scripts)
    drive = Drive(policy("mixed", batching=PreemptAt(0, outputs), **chosen), limits(), depth)
    drive.run(scripts)
    happens = outputs < (stop_after or OUTPUTS) + depth
    assert drive.scheduler.num_preemptions == happens
    assert drive.states[0].num_preemptions == happens
    assert drive.ended == calm.ended
    assert drive.emitted[0][0] == calm.emitted[0][0]
    assert drive.states[0].first_schedule_ns == 0
    if happens and outputs + depth <= (stop_after or OUTPUTS) and not cached:
        # Everything computed before is computed again.
        assert drive.states[0].num_recomputed_tokens == drive.num_recomputed == PROMPT + outputs - 1


@DEPTHS
def test_b2_preemption_while_the_prompt_is_computed(depth: int) -> None:
    """CASES B2: position 0: no token was put out yet, and the prompt starts again."""
    drive = Drive(policy("mixed", batching=PreemptAt(0, 0)), limits(num_tokens=4), depth)
    drive.run(company(None, None))
    assert drive.states[0].num_preemptions == 1
    assert drive.num_recomputed == 4
    assert len(drive.emitted[0]) == OUTPUTS


@pytest.mark.parametrize("rule", ["static", "prefill_first", "mixed"])
@DEPTHS
def test_b2_pressure_changes_no_count(rule: str, depth: int) -> None:
    """CASES B2: a pool too small for all gives every request the tokens that a large one does."""
    scripts = [scripted(i, 3 + i, 8, stop_after=(None, 5)[i % 2], arrival_ns=7 * i) for i in range(5)]
    calm = Drive(policy(rule, watermark=0.0), limits(num_blocks=64), depth)
    calm.run(scripts)
    drive = Drive(policy(rule, watermark=0.0), limits(num_blocks=9), depth)
    drive.run(scripts)
    assert calm.scheduler.num_preemptions == 0
    assert drive.scheduler.num_preemptions > 0
    assert drive.ended == calm.ended


@DEPTHS
def test_f3_preempted_requests_resume_before_newcomers_in_arrival_order(depth: int) -> None:
    """CASES F3: FCFS resumes in arrival order, ahead of a request that never ran."""
    drive = Drive(policy("mixed", watermark=0.0), limits(num_blocks=6), depth)
    waiting = [scripted(i, 3, 6) for i in range(3)]
    drive.run([*waiting, scripted(3, 3, 1, arrival_ns=5)])
    assert [drive.states[i].num_preemptions for i in range(4)] == [0, 1, 1, 0]
    starts = [(plan.step or 0, c.request) for plan in drive.plans for c in plan.chunks if c.start == 0]
    resumed = [request for _, request in sorted(starts)][3:]
    assert resumed == [1, 2, 3]


def test_f3_a_preempted_request_comes_before_whatever_the_order_prefers() -> None:
    """CASES F3: the admission order ranks those that never ran; who was preempted resumes first."""
    drive = Drive(policy("mixed", watermark=0.0, order=ShortestPromptFirst()), limits(num_blocks=4))
    drive.run([scripted(0, 3, 6), scripted(1, 3, 6), scripted(2, 1, 1, arrival_ns=25)])
    assert drive.states[1].num_preemptions == 1
    assert [chunk.request for plan in drive.plans for chunk in plan.chunks] == [0, 1, 1, 2]


def test_a_victim_whose_blocks_are_all_shared_is_passed_over() -> None:
    """CASES A2: preempting it would free nothing, so the rule is asked for another."""
    within = Limits(4, 3, max_model_len=32, block_size=2, num_blocks=6)
    drive = Drive(policy("vllm_v1", victim=OldestVictim(), scheduler_reserve_full_isl=False), within)
    family = {"family": 1, "shared": 4, "block_size": 2}
    drive.add(scripted(0, 8, 1, **family))
    drive.schedule()
    drive.commit()
    drive.add(scripted(1, 5, 8, **family))
    # The rest of the budget begins request 2, which holds two blocks of its own.
    drive.add(scripted(2, 6, 1))
    drive.scheduler.batching = AdmissionsOnly()
    assert drive.schedule().num_prefix_hit_tokens == 4
    drive.commit()
    drive.scheduler.batching = DecodesOnly()
    for _ in range(3):
        drive.schedule()
        drive.commit()
    # Request 1 needs a fifth block. Request 0, the oldest, holds two blocks that 1 holds as well.
    drive.scheduler.batching = policy("mixed").part("batching")
    plan = drive.schedule()
    assert plan.preempted == (1,)
    assert [(chunk.request, chunk.start) for chunk in plan.chunks] == [(0, 4)]
    drive.run([])


def thrash(watermark: float) -> Drive:
    """Eight growing requests in a pool that holds two of them grown up."""
    drive = Drive(policy("mixed", watermark=watermark), limits(num_blocks=20, num_tokens=64, num_seqs=8))
    drive.run([scripted(i, 6, 14, arrival_ns=i) for i in range(8)])
    return drive


def test_f4_thrash_is_counted_and_a_watermark_stops_it() -> None:
    """CASES F4: recomputed tokens show the thrash; blocks kept free for those who run end it."""
    without, kept = thrash(0.0), thrash(0.6)
    assert without.scheduler.num_preemptions > 0
    assert without.num_recomputed > 0
    assert without.num_recomputed == sum(state.num_recomputed_tokens for state in without.states.values())
    assert kept.scheduler.num_preemptions == 0
    assert kept.num_recomputed == 0
    # The same tokens come out, so what was recomputed is all that the first run did in excess.
    work = [sum(plan.shape.num_tokens for plan in drive.plans) for drive in (without, kept)]
    assert work[0] - work[1] == without.num_recomputed


def test_f4_more_watermark_never_recomputes_more() -> None:
    """CASES F4: over a range of watermarks."""
    recomputed = [thrash(watermark).num_recomputed for watermark in (0.0, 0.2, 0.4, 0.6)]
    assert recomputed == sorted(recomputed, reverse=True)


@DEPTHS
def test_m3_facts_outlive_preemption(depth: int) -> None:
    """CASES M3: prompt length, limit and arrival are those that were sent; only progress changes."""
    script = scripted(0, PROMPT, OUTPUTS, arrival_ns=3)
    facts = dataclasses.asdict(script.request)
    drive = Drive(policy("mixed", batching=PreemptAt(0, 4)), limits(), depth)
    drive.run([script])
    state = drive.states[0]
    assert state.num_preemptions == 1
    assert dataclasses.asdict(state.request) == facts
    assert state.num_output_tokens == OUTPUTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.request.num_prompt_tokens = 99  # pyright: ignore[reportAttributeAccessIssue]


@DEPTHS
def test_m4_a_second_run_in_one_process_is_the_same(depth: int) -> None:
    """CASES M4: no counter is shared between schedulers, in whatever order they run."""
    scripts = [scripted(i, 3 + i, 8, arrival_ns=7 * i) for i in range(5)]

    def run() -> Drive:
        drive = Drive(policy("mixed", watermark=0.0), limits(num_blocks=9), depth)
        drive.run(scripts)
        return drive

    first = run()
    other = Drive(policy("static"), limits(num_blocks=12), depth)
    other.run(scripts)
    assert run().plans == first.plans
