"""CASES A1 to A3: abort in every state, overlap, and blocks that a step in flight touches."""

import pytest
from policy_driver import STEP_NS, Drive
from policy_parts import AdmissionsOnly, AdmitThenPreempt, DecodesOnly, PreemptAt
from policy_scripts import scripted

from pagedserve.policy import Limits, PrefillChunk, policy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def limits(num_blocks: int = 16, num_tokens: int = 8, num_seqs: int = 4) -> Limits:
    """A small pool of blocks of 2."""
    return Limits(num_tokens, num_seqs, max_model_len=32, block_size=2, num_blocks=num_blocks)


def steps(drive: Drive, number: int) -> None:
    """Do that many steps in DESIGN's order, leaving as many in flight as the depth allows."""
    for _ in range(number):
        while len(drive.in_flight) > drive.depth:
            drive.commit()
            drive.now_ns += STEP_NS
        drive.schedule()


# What brings request 1 into each state: prompt length, outputs at which it is preempted, steps before the abort.
STATES = {
    "waiting": (12, None, 0),
    "between prefill chunks": (20, None, 2),
    "decoding": (3, None, 3),
    "preempted": (3, 2, 3),
}


@DEPTHS
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a1_abort_in_every_state(depth: int, in_flight: bool, name: str) -> None:
    """CASES A1: no later token of it, its blocks free within one step, the others as if it had not been."""
    prompt, preempt_at, before = STATES[name]
    others = [scripted(0, 3, 12), scripted(2, 5, 7, arrival_ns=1)]
    calm = Drive(policy("mixed"), limits(), depth)
    calm.run(others)
    rule = PreemptAt(1, preempt_at) if preempt_at is not None else "mixed"
    drive = Drive(policy("mixed", batching=rule), limits(), depth)
    for script in (others[0], scripted(1, prompt, 9)):
        drive.add(script)
    steps(drive, before)
    if not in_flight:
        while drive.in_flight:
            drive.commit()
    state = drive.states[1]
    assert bool(state.block_table) == (name in ("between prefill chunks", "decoding"))
    emitted = list(drive.emitted[1])
    assert drive.abort(1)
    assert not drive.abort(1)
    assert state.finish_reason == "abort"
    while drive.in_flight:
        drive.commit()
    held = sum(len(drive.states[i].block_table) for i in drive.live)
    assert drive.scheduler.allocator.num_free_blocks == 16 - held
    drive.run([others[1]])
    assert drive.emitted[1] == emitted
    assert {i: drive.ended[i] for i in (0, 2)} == calm.ended


@DEPTHS
def test_a1_abort_at_every_instant(depth: int) -> None:
    """CASES A1: at each half step of a run under memory pressure; the driver checks every call."""
    scripts = [scripted(i, 5, 8, arrival_ns=6 * i) for i in range(4)]
    for at in range(0, 300, STEP_NS // 2):
        for victim in range(4):
            drive = Drive(policy("mixed", watermark=0.0), limits(num_blocks=8), depth)
            drive.run(scripts, aborts={victim: max(at, 6 * victim)})
            others = [drive.ended[i].num_output_tokens for i in range(4) if i != victim]
            assert others == [8, 8, 8]


def test_a2_freed_blocks_wait_for_the_step_that_writes_them() -> None:
    """CASES A2: aborted in flight, blocks are quarantined, counted as used, and given out after the commit."""
    drive = Drive(policy("mixed", watermark=0.0), limits(num_blocks=4), 1)
    drive.add(scripted(0, 7, 2))
    drive.schedule()
    drive.abort(0)
    allocator = drive.scheduler.allocator
    assert (allocator.num_free_blocks, allocator.num_quarantined_blocks) == (0, 4)
    drive.add(scripted(1, 3, 2))
    assert not drive.schedule()
    drive.commit()
    assert (allocator.num_free_blocks, allocator.num_quarantined_blocks) == (4, 0)
    drive.run([])
    assert drive.ended[1].num_output_tokens == 2


def test_a2_preemption_stops_when_it_frees_nothing_now() -> None:
    """CASES A2: a victim in flight frees nothing before the commit, so no second one is taken."""
    drive = Drive(policy("mixed", watermark=0.0), limits(num_blocks=6, num_tokens=16), 1)
    for i in range(3):
        drive.add(scripted(i, 3, 4))
    drive.schedule()
    drive.schedule()
    drive.commit()
    # All three want a third block at once; the newest gives way, the others stall until its step commits.
    assert not drive.schedule()
    assert [drive.states[i].num_preemptions for i in range(3)] == [0, 0, 1]
    drive.commit()
    plan = drive.schedule()
    assert plan.decodes == (0, 1)
    assert plan.preempted == (2,)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a2_blocks_shared_by_a_stalled_and_a_running_request(order: tuple[int, int]) -> None:
    """CASES A2: request 1 has no token in the step in flight, request 0 has; both are aborted meanwhile.

    The shared block is touched by the step in flight through request 0, even when 1 is the last to let go.
    """
    within = Limits(2, 2, max_model_len=32, block_size=2, num_blocks=8)
    drive = Drive(policy("mixed", enable_prefix_caching=True, watermark=0.0), within, 1)
    family = {"family": 1, "shared": 4, "block_size": 2}
    drive.add(scripted(0, 5, 9, **family))
    for _ in range(3):
        drive.schedule()
        drive.commit()
    # One token of budget beside the decode of 0: request 1 hits blocks 0 and 1 and computes token 4.
    drive.add(scripted(1, 8, 9, **family))
    first = drive.schedule()
    assert first.chunks == (PrefillChunk(1, 4, 1, False),)
    drive.commit()
    drive.scheduler.batching = DecodesOnly()
    step = drive.schedule()
    assert (step.decodes, step.chunks) == ((0,), ())
    drive.scheduler.batching = policy("mixed").part("batching")
    touched = list(drive.states[0].block_table)
    assert touched[:2] == list(dict(first.new_blocks)[1][:2])
    for request in order:
        drive.abort(request)
    assert drive.scheduler.allocator.num_quarantined_blocks == len(touched)
    # As many blocks as may be given out, and the two shared ones, if they are thought to be free.
    drive.add(scripted(2, 2 * (8 - len(touched) + 2), 1))
    drive.schedule()
    drive.run([])


def test_a2_a_hit_that_is_taken_back_in_its_step_waits_as_before() -> None:
    """CASES A2: blocks are hit while a step in flight touches them, and lost again before the plan is made."""
    within = Limits(12, 3, max_model_len=32, block_size=2, num_blocks=6)
    drive = Drive(policy("vllm_v1"), within, 1)
    family = {"family": 1, "shared": 4, "block_size": 2}
    drive.add(scripted(0, 5, 9, **family))
    drive.add(scripted(1, 3, 9))
    drive.schedule()
    drive.schedule()
    drive.commit()
    # Step 1 is in flight with both; 0 goes, and its prefix waits for it, to be hit by 2 already.
    drive.abort(0)
    assert drive.scheduler.allocator.num_quarantined_blocks == 3
    drive.add(scripted(2, 5, 9, **family))
    drive.scheduler.batching = AdmitThenPreempt()
    assert not drive.schedule()
    assert drive.scheduler.allocator.num_quarantined_blocks == 3
    drive.scheduler.batching = policy("mixed").part("batching")
    drive.abort(2)
    # All that is free, and the two blocks, if they are thought to be free as well.
    drive.add(scripted(3, 6, 1))
    drive.schedule()
    drive.run([])


@pytest.mark.parametrize("shared_last", [False, True])
def test_a2_every_block_is_free_as_soon_as_its_own_fence_allows(shared_last: bool) -> None:
    """CASES A1, A2: a release with an older fence is not held back by one with a newer fence before it."""
    within = Limits(3, 3, max_model_len=32, block_size=2, num_blocks=16)
    drive = Drive(policy("mixed", watermark=0.0), within, 1)
    drive.add(scripted(0, 2, 9))
    drive.schedule()
    drive.add(scripted(1, 9, 1))
    drive.schedule()
    drive.commit()
    drive.scheduler.batching = DecodesOnly()
    drive.schedule()
    # Step 1 computed both, step 2 only request 0; both are in flight.
    for request in (0, 1) if not shared_last else (1, 0):
        drive.abort(request)
    drive.commit()
    held_by_step_2 = 2
    assert drive.scheduler.allocator.num_quarantined_blocks == held_by_step_2


@pytest.mark.parametrize("ending", ["abort", "stop"])
def test_a1_ended_after_a_resumption_that_overlaps_its_last_token(ending: str) -> None:
    """CASES A1: preempted with a token in flight, it resumes before that token's step commits, and then ends.

    Possible because an empty plan may be asked for again once an abort has freed blocks.
    """
    within = Limits(6, 2, max_model_len=32, block_size=2, num_blocks=5)
    chosen = policy("mixed", watermark=0.0, scheduler_reserve_full_isl=False)
    drive = Drive(chosen, within, 1)
    drive.add(scripted(0, 8, 1))
    drive.schedule()
    drive.commit()
    drive.add(scripted(1, 3, 4, stop_after=2))
    drive.scheduler.batching = AdmissionsOnly()
    drive.schedule()
    drive.commit()
    drive.scheduler.batching = DecodesOnly()
    # Step 2 samples request 1's second token, its last; then it lacks a block and gives way to itself.
    assert drive.schedule().decodes == (1,)
    assert not drive.schedule()
    assert drive.states[1].num_preemptions == 1
    drive.abort(0)
    drive.scheduler.batching = policy("mixed").part("batching")
    plan = drive.schedule()
    assert all((c.request, c.num_tokens, c.samples) == (1, 5, True) for c in plan.chunks)
    if ending == "abort":
        drive.abort(1)
    drive.commit()
    assert drive.ended[1].reason == ending
    drive.run([])


def test_a1_aborted_after_a_stall_that_overlaps_its_last_token() -> None:
    """CASES A1: a decode stalls with a token in flight, goes on before that token's step commits, and is aborted."""
    within = Limits(6, 3, max_model_len=32, block_size=2, num_blocks=6)
    drive = Drive(policy("mixed", watermark=0.0, scheduler_reserve_full_isl=False), within, 1)
    drive.add(scripted(0, 8, 1))
    drive.schedule()
    drive.commit()
    drive.add(scripted(1, 3, 9))
    drive.add(scripted(2, 1, 9))
    drive.scheduler.batching = AdmissionsOnly()
    drive.schedule()
    drive.commit()
    drive.scheduler.batching = DecodesOnly()
    assert drive.schedule().decodes == (1, 2)
    # The block of request 2 is to come, so 1 waits for it and preempts nobody.
    drive.abort(2)
    assert not drive.schedule()
    drive.abort(0)
    assert drive.schedule().decodes == (1,)
    drive.abort(1)
    drive.commit()
    drive.commit()
    assert drive.scheduler.num_discarded_tokens == 3
    drive.run([])


def test_a1_only_steps_that_sample_a_token_are_discarded() -> None:
    """CASES A1: two steps are in flight and only the second decodes: one token is discarded, not two."""
    drive = Drive(policy("prefill_first"), limits(), 1)
    drive.add(scripted(0, 3, 9))
    drive.schedule()
    drive.add(scripted(1, 2, 1))
    assert [chunk.request for chunk in drive.schedule().chunks] == [1]
    drive.commit()
    assert drive.schedule().decodes == (0,)
    drive.abort(0)
    drive.commit()
    drive.commit()
    assert drive.scheduler.num_discarded_tokens == 1
    assert drive.states[0].num_output_tokens == 1
    drive.run([])


def test_a3_the_row_behind_a_stop_releases_once() -> None:
    """CASES A3: a request that stops with one row in flight gives its blocks back one time."""
    drive = Drive(policy("mixed"), limits(num_blocks=4), 1)
    drive.run([scripted(0, 3, 9, stop_after=3), scripted(1, 3, 9, stop_after=1)])
    assert drive.scheduler.num_discarded_tokens == 2


@pytest.mark.parametrize("allocator", ["paged", "contiguous_max", "contiguous_limit"])
@pytest.mark.parametrize("fence", [None, 5])
def test_a3_a_double_release_raises(allocator: str, fence: int | None) -> None:
    """CASES A3: releasing blocks that are free, or quarantined, is our own bug and raises at once."""
    drive = Drive(policy("mixed", allocator=allocator), limits())
    drive.add(scripted(0, 3, 9))
    drive.schedule()
    state, pool = drive.states[0], drive.scheduler.allocator
    pool.release(state, fence)
    with pytest.raises(AssertionError, match="request 0 were released twice"):
        pool.release(state, None)


@pytest.mark.parametrize("fence", [None, 5])
@pytest.mark.parametrize("allocator", ["paged", "contiguous_max", "contiguous_limit"])
def test_a3_releasing_a_stale_table_raises(allocator: str, fence: int | None) -> None:
    """CASES A3: a table kept beyond its release names blocks that are free, or quarantined."""
    drive = Drive(policy("mixed", allocator=allocator), limits())
    drive.add(scripted(0, 3, 9))
    drive.schedule()
    state, pool = drive.states[0], drive.scheduler.allocator
    table = list(state.block_table)
    pool.release(state, fence)
    state.block_table = table
    with pytest.raises(AssertionError, match="request 0 were released twice"):
        pool.release(state, None)
