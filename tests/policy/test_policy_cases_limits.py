"""CASES A4, A5, A8 and M5: requests that can never run, those that outgrow the pool, and what drains."""

import pytest
from policy_driver import Drive
from policy_scripts import scripted

from pagedserve.policy import Limits, Outcome, Scheduler, policy
from pagedserve.policy.errors import (
    DuplicateRequest,
    EmptyPrompt,
    InvalidLimit,
    PromptExceedsModel,
    PromptExceedsPool,
    QueueFull,
)

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def limits(num_blocks: int = 16, num_tokens: int = 8, num_seqs: int = 4) -> Limits:
    """A small pool of blocks of 2."""
    return Limits(num_tokens, num_seqs, max_model_len=32, block_size=2, num_blocks=num_blocks)


@DEPTHS
def test_a4_a_prompt_of_the_models_length_is_refused_with_the_numbers(depth: int) -> None:
    """CASES A4: it leaves no room for a token; one token less runs and yields exactly one."""
    drive = Drive(policy("mixed"), Limits(8, 2, max_model_len=10, block_size=2, num_blocks=8), depth)
    with pytest.raises(
        PromptExceedsModel, match=r"request 0 has 10 prompt tokens.*max_model_len is 10.*\b9\b"
    ):
        drive.add(scripted(0, 10, 1))
    assert not drive.scheduler.has_work
    drive.run([scripted(1, 9, 5)])
    assert drive.ended[1] == (1, "length", 1)


@DEPTHS
@pytest.mark.parametrize("allocator", ["paged", "contiguous_limit"])
def test_a4_m5_a_prompt_larger_than_the_pool_is_refused_with_the_numbers(depth: int, allocator: str) -> None:
    """CASES A4, M5: an error at admission, and nobody behind it is blocked."""
    drive = Drive(policy("mixed", allocator=allocator), limits(num_blocks=4), depth)
    with pytest.raises(PromptExceedsPool, match=r"request 0 has 9 prompt tokens.*5 KV blocks.*4 of 2"):
        drive.add(scripted(0, 9, 1))
    drive.run([scripted(1, 8, 5), scripted(2, 2, 2)])
    # The whole pool for the prompt: the one token that needs no slot.
    assert drive.ended[1] == (1, "length", 1)
    assert drive.ended[2] == (2, "length", 2)


@DEPTHS
@pytest.mark.parametrize("rule", ["serial", "static", "prefill_first", "mixed"])
def test_a4_an_output_that_outgrows_the_pool_ends_with_length(depth: int, rule: str) -> None:
    """CASES A4: alone or in company, it finishes and does not preempt itself for ever."""
    drive = Drive(policy(rule, watermark=0.0), limits(num_blocks=4), depth)
    drive.run([scripted(0, 3, 25), scripted(1, 3, 25), scripted(2, 2, 2)])
    # 8 slots: 3 prompt tokens and 5 outputs in KV, and a sixth that needs no slot.
    assert drive.ended[0] == (0, "length", 6)
    assert drive.ended[1] == (1, "length", 6)


@DEPTHS
@pytest.mark.parametrize("rule", ["serial", "static", "prefill_first", "mixed"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a4_a_pool_of_one_block(depth: int, rule: str, block_size: int) -> None:
    """CASES A4: the smallest pool serves what fits it, one at a time."""
    within = Limits(4, 2, max_model_len=8, block_size=block_size, num_blocks=1)
    drive = Drive(policy(rule), within, depth)
    drive.run([scripted(i, 1, 6, arrival_ns=i) for i in range(3)])
    assert [drive.ended[i].num_output_tokens for i in range(3)] == [block_size] * 3
    assert drive.scheduler.num_preemptions <= 3


@pytest.mark.parametrize("victim_fits", [True, False])
@DEPTHS
def test_a4_prefill_first_with_first_chunk_admission_makes_progress(depth: int, victim_fits: bool) -> None:
    """CASES A4, F4: a decode that waits for a block comes before the prompt that was preempted for it."""
    chosen = policy("prefill_first", watermark=0.0, scheduler_reserve_full_isl=False)
    within = Limits(4, 4, max_model_len=64, block_size=4, num_blocks=4)
    drive = Drive(chosen, within, depth)
    drive.run([scripted(0, 4, 12), scripted(1, 11 if victim_fits else 14, 2, arrival_ns=5)], max_steps=200)
    assert drive.ended[0].num_output_tokens == 12


def test_a5_everything_drains_under_every_rule_and_allocator() -> None:
    """CASES A5: the driver checks free + cached == total, references and counters at the end of each run."""
    scripts = [scripted(i, 1 + 3 * i % 9, 6, arrival_ns=4 * i, stop_after=(None, 2)[i % 2]) for i in range(8)]
    for rule in ("serial", "static", "prefill_first", "mixed"):
        for allocator in ("paged", "contiguous_max", "contiguous_limit"):
            for depth in (0, 1):
                drive = Drive(policy(rule, allocator=allocator), limits(num_blocks=16), depth)
                drive.run(scripts, aborts={1: 9, 4: 55})
                assert len(drive.ended) == 8


@DEPTHS
@pytest.mark.parametrize("rule", ["static", "prefill_first", "mixed"])
def test_a8_four_cold_prompts_and_a_limit_of_four_run_together(depth: int, rule: str) -> None:
    """CASES A8: no latched flag keeps a seat empty, also when the first step's tokens do not suffice."""
    drive = Drive(policy(rule), limits(num_blocks=32, num_tokens=8), depth)
    drive.run([scripted(i, 4, 6) for i in range(4)])
    assert max(len(plan.decodes) for plan in drive.plans) == 4
    assert all(emitted[0] <= 2 for emitted in drive.emitted.values())


def test_refusals_name_the_numbers_and_leave_no_trace() -> None:
    """The other refusals of ``add``."""
    within = Limits(8, 1, max_model_len=32, block_size=2, num_blocks=8, max_num_queued_reqs=2)
    drive = Drive(policy("vllm_v1"), within)
    with pytest.raises(EmptyPrompt, match="request 0 has 0 prompt tokens"):
        drive.add(scripted(0, 0, 1))
    with pytest.raises(InvalidLimit, match="request 0 has max_tokens 0"):
        drive.add(scripted(0, 1, 0))
    with pytest.raises(
        InvalidLimit, match=r"request 0 has 2 prefix keys.*9 prompt tokens have 4 full blocks of 2"
    ):
        drive.add(scripted(0, 9, 1, block_size=4))
    drive.add(scripted(1, 3, 2))
    with pytest.raises(DuplicateRequest, match="request 1"):
        drive.scheduler.add(scripted(1, 3, 2).request, 0)
    drive.add(scripted(2, 3, 2))
    with pytest.raises(QueueFull, match="2 requests wait and max_num_queued_reqs is 2"):
        drive.add(scripted(3, 3, 2))
    del drive.mirror.scripts[3]
    drive.run([])
    assert sorted(drive.ended) == [1, 2]


def test_an_ended_requests_id_may_be_used_again() -> None:
    """The old one's past does not hold back the new one."""
    drive = Drive(policy("mixed", watermark=0.0), Limits(8, 4, max_model_len=32, block_size=2, num_blocks=4))
    drive.add(scripted(0, 4, 3))
    drive.schedule()
    drive.commit()
    drive.add(scripted(5, 8, 1))
    assert not drive.schedule().chunks
    drive.commit()
    drive.abort(5)
    drive.add(scripted(5, 1, 1))
    (chunk,) = drive.schedule().chunks
    assert (chunk.request, chunk.num_tokens) == (5, 1)


def test_a_reused_id_is_not_taken_for_the_old_request_in_flight() -> None:
    """The old request's token and stop are discarded; the new one, planned behind it, keeps its own."""
    scheduler = Scheduler(policy("mixed"), limits(), 1)
    scheduler.add(scripted(5, 3, 4).request, 0)
    assert scheduler.schedule(0).chunks == ((5, 0, 3, True),)
    scheduler.abort(5, 1)
    new = scheduler.add(scripted(5, 2, 2).request, 2)
    plan = scheduler.schedule(2)
    assert (plan.departed, [request.num_prompt_tokens for request in plan.new_requests]) == ((5,), [2])
    assert plan.chunks == ((5, 0, 2, True),)
    assert scheduler.commit(0, [Outcome(5, 1, "stop")], 3) == []
    assert scheduler.num_discarded_tokens == 1
    scheduler.check()
    assert scheduler.schedule(3).decodes == (5,)
    assert scheduler.commit(1, [], 4) == []
    assert scheduler.commit(2, [], 5) == [(5, "length", 2)]
    assert new.num_output_tokens == 2
    scheduler.check()
