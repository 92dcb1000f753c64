"""Every invariant of a scheduler, recomputed from scratch; for tests and ``--check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedserve.policy.request import Status

if TYPE_CHECKING:
    from pagedserve.policy.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError naming what is off. Cost: proportional to everything that runs and waits."""
    _check_places(scheduler)
    _check_progress(scheduler)
    _check_group(scheduler)
    _check_blocks(scheduler)


def _check_places(scheduler: Scheduler) -> None:
    """Every live request is in exactly one place, with the status that goes with it."""
    running, group = scheduler.running, scheduler.group.members
    parts = [scheduler.prefilling, scheduler.stalled, scheduler.draining, group]
    seated = [request for part in parts for request in part]
    assert sorted(seated) == sorted(running), (
        "running requests are not exactly those in one of the four places"
    )
    assert all(state.status is Status.RUNNING for state in running.values())
    waiting = [state for state in scheduler.states.values() if state.queue_ticket is not None]
    in_queue = list(scheduler.waiting)
    assert len(scheduler.waiting) == len(in_queue), "the queue's length is off"
    assert {state.id for state in in_queue} == {state.id for state in waiting}, "the queue lost a request"
    assert scheduler.stalled.keys() <= scheduler.wanting.keys() <= running.keys()
    assert all(state.status in (Status.WAITING, Status.PREEMPTED) for state in waiting)
    assert len(waiting) + len(running) == len(scheduler.states), "a live request neither runs nor waits"
    assert len(running) <= scheduler.limits.max_num_seqs
    admissions = [state.admission for state in running.values()]
    assert admissions == sorted(admissions), "running requests are not in admission order"
    assert len(scheduler.in_flight) <= scheduler.overlap_depth + 1


def _check_progress(scheduler: Scheduler) -> None:
    for state in scheduler.states.values():
        assert 0 <= state.num_computed_tokens <= state.num_known_tokens
        assert 0 <= state.num_output_tokens <= state.limit
        if state.id not in scheduler.running:
            assert not state.block_table
            assert state.num_computed_tokens == 0
    for state in scheduler.prefilling.values():
        assert state.num_remaining_tokens >= 1
    for state in scheduler.draining.values():
        assert state.num_output_tokens == state.limit


def _check_group(scheduler: Scheduler) -> None:
    group = scheduler.group
    contexts = [state.num_computed_tokens for state in group.members.values()]
    shape = group.shape((), 0, runs=True)
    assert shape.num_decodes == len(contexts)
    assert shape.decode_context_sum == sum(contexts), "the group's context sum is off"
    assert shape.decode_context_max == max(contexts, default=0), "the group's context maximum is off"
    assert shape.decode_context_sumsq == sum(c * c for c in contexts), "the group's context squares are off"
    for state in [*group.members.values(), *scheduler.stalled.values()]:
        assert state.num_known_tokens == state.num_computed_tokens + 1, f"request {state.id} cannot decode"
        assert state.num_output_tokens < state.limit


def _check_blocks(scheduler: Scheduler) -> None:
    allocator, limits = scheduler.allocator, scheduler.limits
    allocator.check(scheduler.running.values())
    scheduler.host.check(scheduler.states.values(), limits.block_size)
    assert allocator.num_cached_blocks <= allocator.num_free_blocks <= limits.num_blocks
    if not scheduler.states and not scheduler.in_flight:
        assert allocator.num_free_blocks == limits.num_blocks, "blocks leaked: nothing is left to hold them"
        assert allocator.num_live_tokens == 0
    if not scheduler.in_flight:
        assert allocator.num_quarantined_blocks == 0, "a block is quarantined with no step in flight"
