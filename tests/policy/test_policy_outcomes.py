"""``schedule`` and ``commit`` refuse calls and outcomes that do not belong to the step."""

import pytest
from policy_scripts import scripted

from pagedserve.policy import Limits, Outcome, Scheduler, StepPlan, policy

LIMITS = Limits(8, 4, max_model_len=32, block_size=4, num_blocks=8)


def started(depth: int = 0, cached: bool = False, prompt: int = 3) -> tuple[Scheduler, StepPlan]:
    """A scheduler with one step in flight: request 0 samples, request 1 has a chunk that does not."""
    scheduler = Scheduler(policy("vllm_v1" if cached else "mixed"), LIMITS, depth)
    block_size = 4 if cached else None
    scheduler.add(scripted(0, prompt, 5, block_size=block_size).request, 0)
    scheduler.add(scripted(1, 9, 5, block_size=block_size).request, 0)
    return scheduler, scheduler.schedule(0)


@pytest.mark.parametrize("depth", [2, -1])
def test_depth_is_0_or_1(depth: int) -> None:
    with pytest.raises(ValueError, match=f"overlap_depth is {depth}"):
        Scheduler(policy("mixed"), LIMITS, depth)


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_steps_in_flight_than_the_depth_allows(depth: int) -> None:
    scheduler, _ = started(depth)
    if depth:
        scheduler.schedule(0)
    with pytest.raises(RuntimeError, match=f"{depth + 1} steps are in flight.*overlap_depth is {depth}"):
        scheduler.schedule(0)


def test_steps_commit_in_order_and_once() -> None:
    scheduler, first = started(1)
    second = scheduler.schedule(0)
    assert (first.step, second.step) == (0, 1)
    with pytest.raises(RuntimeError, match=r"commit of step 1; the oldest step in flight is 0"):
        scheduler.commit(1, [], 1)
    scheduler.commit(0, [], 1)
    with pytest.raises(RuntimeError, match=r"commit of step 0; the oldest step in flight is 1"):
        scheduler.commit(0, [], 1)
    scheduler.commit(1, [], 2)
    with pytest.raises(RuntimeError, match=r"commit of step 1; the oldest step in flight is None"):
        scheduler.commit(1, [], 2)
    scheduler.check()


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(7),
        Outcome(0, num_tokens=0),
        Outcome(0, num_tokens=2),
        Outcome(1, num_tokens=1),
        Outcome(1, num_tokens=0, stop_reason="stop"),
        Outcome(0, new_block_keys=("key",)),
    ],
    ids=str,
)
def test_outcomes_that_do_not_belong_to_the_step(outcome: Outcome) -> None:
    scheduler, plan = started()
    assert plan.step == 0
    with pytest.raises(ValueError, match=rf"request.*{outcome.request}"):
        scheduler.commit(0, [outcome], 1)
    # The step is still in flight, and nothing has changed.
    scheduler.check()
    assert scheduler.commit(0, [Outcome(0, 1, "stop")], 1) == [(0, "stop", 1)]
    scheduler.check()


def test_two_outcomes_of_one_request() -> None:
    scheduler, _ = started()
    with pytest.raises(ValueError, match=r"request.*0"):
        scheduler.commit(0, [Outcome(0, 1, "stop"), Outcome(0, 1)], 1)


def test_keys_are_due_for_the_blocks_that_the_plan_names() -> None:
    scheduler, _ = started(cached=True)
    scheduler.commit(0, [], 1)
    plan = scheduler.schedule(1)
    # Request 0 computes its first output at position 3.
    assert plan.filled == ((0, 0),)
    for outcomes in ([], [Outcome(0)], [Outcome(0, new_block_keys=("a", "b"))]):
        with pytest.raises(ValueError, match=r"request.*0"):
            scheduler.commit(1, outcomes, 2)
    scheduler.commit(1, [Outcome(0, new_block_keys=("a",))], 2)
    scheduler.check()


def test_an_outcome_of_an_aborted_request_is_ignored() -> None:
    scheduler, _ = started()
    scheduler.abort(0, 0)
    assert scheduler.commit(0, [Outcome(0, 1, "stop")], 1) == []
    assert scheduler.num_discarded_tokens == 1
    scheduler.check()


def test_stop_wins_over_length_and_any_reason_is_passed_on() -> None:
    scheduler = Scheduler(policy("mixed"), LIMITS)
    scheduler.add(scripted(0, 3, 1).request, 0)
    scheduler.add(scripted(1, 3, 1).request, 0)
    scheduler.schedule(0)
    assert scheduler.commit(0, [Outcome(0, 1, "tool_calls")], 1) == [(0, "tool_calls", 1), (1, "length", 1)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("limit", [1, 5])
def test_a_request_may_end_without_the_token_it_was_to_sample(limit: int, depth: int) -> None:
    """Its first, or also its last; at depth 1 with a further one in flight."""
    scheduler = Scheduler(policy("mixed"), LIMITS, depth)
    scheduler.add(scripted(0, 3, limit).request, 0)
    scheduler.add(scripted(1, 3, 1).request, 0)
    scheduler.schedule(0)
    if depth:
        scheduler.schedule(0)
    assert scheduler.commit(0, [Outcome(0, 0, "error")], 1) == [(0, "error", 0), (1, "length", 1)]
    assert scheduler.num_discarded_tokens == 0
    scheduler.check()
    if scheduler.in_flight:
        assert scheduler.commit(1, [], 2) == []
        assert scheduler.num_discarded_tokens == 1
    assert scheduler.allocator.num_free_blocks == LIMITS.num_blocks
    scheduler.check()
