"""The mirror itself: it sees every part of a plan that is missing, doubled or wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from policy_driver import STEP_NS, Drive
from policy_mirror import Mirror
from policy_scripts import scripted

from pagedserve.policy import Limits, PrefillChunk, StepPlan, StepShape, policy

LIMITS = Limits(8, 3, max_model_len=32, block_size=2, num_blocks=8)
FAMILY = {"family": 1, "shared": 12, "block_size": 2}


def run_recorded() -> tuple[Drive, list[StepPlan | int]]:
    """A run with hits, chunks, preemption and departures; its plans and commits in order."""
    drive = Drive(policy("vllm_v1"), LIMITS, 1)
    calls: list[StepPlan | int] = []
    apply, commit = drive.mirror.apply, drive.mirror.commit

    def note_apply(plan: StepPlan) -> None:
        calls.append(plan)
        apply(plan)

    def note_commit(step: int, num_keys: dict[int, int]) -> None:
        calls.append(step)
        commit(step, num_keys)

    drive.mirror.apply, drive.mirror.commit = note_apply, note_commit
    drive.run(
        [
            scripted(0, 7, 6, **FAMILY),
            scripted(1, 5, 7, arrival_ns=STEP_NS, **FAMILY),
            scripted(2, 9, 3, arrival_ns=2 * STEP_NS, **FAMILY),
            scripted(3, 9, 3, arrival_ns=16 * STEP_NS, **FAMILY),
        ]
    )
    return drive, calls


def replay(drive: Drive, calls: list[StepPlan | int]) -> None:
    """Show the calls to a fresh mirror; keys count as given when their step commits."""
    mirror = Mirror(LIMITS, prefix_caching=True)
    mirror.scripts = drive.mirror.scripts
    due: dict[int, StepPlan] = {}
    for call in calls:
        if isinstance(call, StepPlan):
            assert call.step is not None
            due[call.step] = call
            mirror.apply(call)
        else:
            plan = due.pop(call)
            ended = {f.request: len(drive.emitted[f.request]) for f in drive.ended.values()}
            alive = [r for r, _ in plan.filled if ended[r] and call <= drive.emitted[r][-1]]
            mirror.commit(call, {r: alive.count(r) for r in alive})


def test_the_recorded_run_is_rich_and_replays() -> None:
    drive, calls = run_recorded()
    plans = drive.plans
    for part in (
        "new_requests",
        "chunks",
        "decodes",
        "joined",
        "left",
        "preempted",
        "departed",
        "new_blocks",
        "filled",
    ):
        assert any(getattr(plan, part) for plan in plans), f"no plan has {part}"
    assert any(plan.num_recomputed_tokens for plan in plans)
    assert any(plan.num_prefix_hit_tokens for plan in plans)
    replay(drive, calls)


def _moved(chunk: PrefillChunk) -> PrefillChunk:
    return chunk._replace(start=chunk.start + 1)


def _same_blocks(plan: StepPlan) -> dict[str, Any] | None:
    """The second owner is told the first block of the first in place of its last."""
    if len(plan.new_blocks) < 2:
        return None
    (first, blocks), (second, others), *rest = plan.new_blocks
    return {"new_blocks": ((first, blocks), (second, (*others[:-1], blocks[-1])), *rest)}


def _out_of_pool(plan: StepPlan) -> dict[str, Any] | None:
    if not plan.new_blocks:
        return None
    (owner, blocks), *rest = plan.new_blocks
    return {"new_blocks": ((owner, (*blocks[:-1], LIMITS.num_blocks)), *rest)}


TAMPERINGS: dict[str, Callable[[StepPlan], dict[str, Any] | None]] = {
    "a departure is not told": lambda p: {"departed": ()} if p.departed else None,
    "a preemption is not told": lambda p: {"preempted": ()} if p.preempted else None,
    "a joining is not told": lambda p: {"joined": ()} if p.joined and p.decodes else None,
    "a leaving is not told": lambda p: {"left": ()} if p.left and p.decodes else None,
    "facts are not told": lambda p: {"new_requests": ()} if p.new_requests else None,
    "facts are told twice": lambda p: {"new_requests": p.new_requests * 2} if p.new_requests else None,
    "blocks are not told": lambda p: {"new_blocks": ()} if p.new_blocks else None,
    "two requests are told the same block": _same_blocks,
    "a block out of the pool is told": _out_of_pool,
    "a chunk skips a token": lambda p: {"chunks": (_moved(p.chunks[0]), *p.chunks[1:])} if p.chunks else None,
    "a chunk is left out": lambda p: {"chunks": p.chunks[1:]} if p.chunks else None,
    "a chunk lies about sampling": (
        lambda p: (
            {"chunks": (p.chunks[0]._replace(samples=not p.chunks[0].samples), *p.chunks[1:])}
            if p.chunks
            else None
        )
    ),
    "decodes in another order": lambda p: {"decodes": p.decodes[::-1]} if len(p.decodes) > 1 else None,
    "a decode is left out": lambda p: {"decodes": p.decodes[1:]} if p.decodes else None,
    "the same group, another object": (
        lambda p: (
            {"decodes": (*p.decodes,)}
            if p.decodes and not (p.joined or p.left or p.preempted or p.departed)
            else None
        )
    ),
    "a filled block is not told": lambda p: {"filled": ()} if p.filled else None,
    "a block is called filled": lambda p: {"filled": (*p.filled, (0, 9))},
    "the shape is off by one": (
        lambda p: {
            "shape": dataclasses.replace(p.shape, decode_context_sumsq=p.shape.decode_context_sumsq + 1)
        }
    ),
    "the context is off by one": (
        lambda p: {"shape": dataclasses.replace(p.shape, decode_context_max=p.shape.decode_context_max + 1)}
    ),
    "recomputed tokens are off": lambda p: {"num_recomputed_tokens": p.num_recomputed_tokens + 1},
    "hit tokens are off": lambda p: {"num_prefix_hit_tokens": p.num_prefix_hit_tokens + 2},
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_the_mirror_sees_every_tampering(name: str) -> None:
    """In each plan of the run that has the part in question."""
    drive, calls = run_recorded()
    tried = 0
    for index, call in enumerate(calls):
        change = TAMPERINGS[name](call) if isinstance(call, StepPlan) else None
        if change is None or not isinstance(call, StepPlan):
            continue
        if "decodes" in change and change["decodes"] is call.decodes:
            continue
        tried += 1
        tampered = [*calls[:index], dataclasses.replace(call, **change), *calls[index + 1 :]]
        with pytest.raises((AssertionError, KeyError, IndexError)):
            replay(drive, tampered)
    assert tried


def two_plans(second_hits: bool) -> tuple[Mirror, StepPlan, StepPlan]:
    """Request 0 fills block 0 in step 0; in step 1 block 0 is written, or hit, by request 1."""
    mirror = Mirror(LIMITS, prefix_caching=True)
    old, new = scripted(0, 2, 1, **FAMILY), scripted(1, 4, 1, **FAMILY)
    mirror.scripts = {0: old, 1: new}
    first = StepPlan(
        0,
        new_requests=(old.request,),
        chunks=(PrefillChunk(0, 0, 2, True),),
        new_blocks=((0, (0,)),),
        shape=StepShape(((2, 0),), num_samples=1),
    )
    start = 2 if second_hits else 0
    second = StepPlan(
        1,
        new_requests=(new.request,),
        chunks=(PrefillChunk(1, start, 4 - start, True),),
        departed=(0,),
        new_blocks=((1, (0, 1)),),
        shape=StepShape(((4 - start, start),), num_samples=1),
        num_prefix_hit_tokens=start,
    )
    return mirror, first, second


@pytest.mark.parametrize(("hits", "message"), [(False, "while step 0 in flight"), (True, "not committed")])
def test_the_mirror_sees_blocks_reused_or_hit_too_early(hits: bool, message: str) -> None:
    """CASES A2 and B9: the same two plans are right once step 0 has committed."""
    mirror, first, second = two_plans(hits)
    mirror.apply(first)
    mirror.commit(0, {})
    mirror.apply(second)
    mirror, first, second = two_plans(hits)
    mirror.apply(first)
    with pytest.raises(AssertionError, match=message):
        mirror.apply(second)


def test_the_mirror_sees_foreign_kv() -> None:
    """CASES B7, B8: a hit on a block of another text."""
    mirror, first, second = two_plans(True)
    mirror.scripts[0] = scripted(0, 2, 1, family=2, shared=12, block_size=2)
    first = dataclasses.replace(first, new_requests=(mirror.scripts[0].request,))
    mirror.apply(first)
    mirror.commit(0, {})
    with pytest.raises(AssertionError, match="foreign KV"):
        mirror.apply(second)
