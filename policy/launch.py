"""From a composed step to a plan: progress changes, and a worker hears what changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedserve.policy.errors import IllegalPlan
from pagedserve.policy.in_flight import InFlightState
from pagedserve.policy.plan import PrefillChunk, StepPlan, StepShape, Swap

if TYPE_CHECKING:
    from pagedserve.policy.scheduler import Scheduler
    from pagedserve.policy.step import Step


def launch(scheduler: Scheduler, step: Step, departed: Iterable[int], preempted: Iterable[int]) -> StepPlan:
    """Number the step, change progress, and put it in flight.

    ``departed`` and ``preempted``: since the last launched plan. A worker that never heard of a request, or will
    not hear of it again, is not told of its preemption.
    """
    number, group = scheduler.next_step, scheduler.group
    decodes = step.decodes and bool(group.members)
    scheduler.next_step += 1
    chunks = tuple(step.chunks.values())
    lengths = tuple([(chunk.num_tokens, chunk.start) for chunk in chunks])
    shape = group.shape(lengths, sum([chunk.samples for chunk in chunks]), decodes)
    _check_budget(scheduler, shape)
    rows = group.ids() if decodes else ()
    joined, left = group.take_changes()
    states = scheduler.states
    known = [r for r in preempted if r in states and r not in step.new_requests]
    swapped_out, swapped_in, brought_back = scheduler.host.take_plan()
    if swapped_out or swapped_in:
        shape = _with_swaps(shape, swapped_out, swapped_in)
    flight = InFlightState(StepPlan(number))
    if decodes:
        _run_group(scheduler, flight)
    for chunk in chunks:
        _run_chunk(scheduler, flight, chunk, brought_back.get(chunk.request))
    flight.plan = StepPlan(
        number,
        tuple(step.new_requests.values()),
        chunks,
        rows,
        joined,
        left,
        tuple([r for r in known if states[r].first_schedule_ns is not None]),
        tuple(departed),
        tuple([(owner, blocks) for owner, blocks in step.new_blocks.items() if blocks]),
        tuple(flight.keys_due()),
        swapped_out,
        swapped_in,
        shape,
        step.num_recomputed_tokens,
        step.num_prefix_hit_tokens,
    )
    scheduler.in_flight.append(flight)
    return flight.plan


def _check_budget(scheduler: Scheduler, shape: StepShape) -> None:
    most = scheduler.limits.max_num_batched_tokens
    if shape.num_tokens > most:
        rule = type(scheduler.batching).__name__
        raise IllegalPlan(
            f"{rule} made a step of {shape.num_tokens} tokens; max_num_batched_tokens is {most}"
        )


def _with_swaps(shape: StepShape, swapped_out: tuple[Swap, ...], swapped_in: tuple[Swap, ...]) -> StepShape:
    return replace(
        shape,
        num_blocks_swapped_out=sum([len(swap.blocks) for swap in swapped_out]),
        num_blocks_swapped_in=sum([len(swap.blocks) for swap in swapped_in]),
    )


def _run_group(scheduler: Scheduler, flight: InFlightState) -> None:
    """Do the decode group's round."""
    assert flight.plan.step is not None
    group = scheduler.group
    scheduler.allocator.num_live_tokens += len(group)
    flight.ends += group.run(flight.plan.step)
    scheduler.draining.update({state.id: state for state in flight.ends})
    if scheduler.policy.enable_prefix_caching:
        size = scheduler.limits.block_size
        for state in [s for s in flight.ends if s.base_computed % size == 0] + group.needing_block():
            index = state.num_computed_tokens // size - 1
            flight.filled.append((state, index, [state.block_table[index]]))


def _run_chunk(
    scheduler: Scheduler, flight: InFlightState, chunk: PrefillChunk, brought_back: int | None
) -> None:
    """Book a chunk; a request whose chunk samples goes on in the decode group.

    ``brought_back``: the first of the blocks in its table that are copied from the host, if any are.
    """
    number = flight.plan.step
    assert number is not None
    state, size = scheduler.states[chunk.request], scheduler.limits.block_size
    state.base_last_step = number
    if scheduler.policy.enable_prefix_caching:
        first = chunk.start // size if brought_back is None else brought_back
        blocks = state.block_table[first : state.base_computed // size]
        if blocks:
            flight.filled.append((state, first, blocks))
    if chunk.samples:
        del scheduler.prefilling[state.id]
        state.base_sampled += 1
        if state.base_sampled < state.limit:
            scheduler.group.join(state, number)
        else:
            state.samples_since = number
            scheduler.draining[state.id] = state
            flight.ends.append(state)
