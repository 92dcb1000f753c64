"""CASES B3 to B9 and B11 at the level of plans and blocks: recomputation and the prefix cache.

The driver's mirror keeps the content of every KV slot, so "right output" here means: no row ever reads or
hits a slot that does not hold its own text, and no hit rests on a step that has not committed.
"""

import dataclasses

import pytest
from policy_driver import STEP_NS, Drive
from policy_parts import PreemptAt
from policy_scripts import Script, scripted

from pagedserve.policy import Limits, policy

CACHED = policy("vllm_v1")
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def limits(num_blocks: int = 16, num_tokens: int = 16, block_size: int = 4) -> Limits:
    """A small pool."""
    return Limits(num_tokens, 4, max_model_len=48, block_size=block_size, num_blocks=num_blocks)


@DEPTHS
@pytest.mark.parametrize(("outputs", "num_hit_blocks"), [(1, 2), (3, 2), (6, 3), (10, 4)])
def test_b3_resuming_computes_known_tokens_minus_the_hit(
    depth: int, outputs: int, num_hit_blocks: int
) -> None:
    """CASES B3: preempted with its blocks still cached, it computes total - hit, with a right block table."""
    chosen = policy("vllm_v1", batching=PreemptAt(request=0, outputs=outputs))
    drive = Drive(chosen, limits(), depth)
    drive.run([scripted(0, 8, 12, block_size=4), scripted(1, 3, 20, block_size=4)])
    resumed = next(plan for plan in drive.plans if any(c.request == 0 and c.start for c in plan.chunks))
    (chunk,) = [chunk for chunk in resumed.chunks if chunk.request == 0]
    known = 8 + outputs
    assert chunk.start == 4 * num_hit_blocks
    assert chunk.num_tokens == known - chunk.start
    assert chunk.samples
    (blocks,) = [blocks for owner, blocks in resumed.new_blocks if owner == 0]
    assert len(blocks) == -(-known // 4)
    assert resumed.num_prefix_hit_tokens == chunk.start
    # Its last known token was sampled but never computed: it is not computed again.
    assert resumed.num_recomputed_tokens == known - 1 - chunk.start


@DEPTHS
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_b4_a_fully_cached_prompt_leaves_a_token_to_compute(depth: int, num_blocks: int) -> None:
    """CASES B4: a cached prompt of exactly k blocks hits k - 1 of them and computes the last block."""
    prompt = 4 * num_blocks
    drive = Drive(CACHED, limits(), depth)
    twins = [scripted(i, prompt, 3, arrival_ns=100 * i, family=1, shared=40, block_size=4) for i in range(2)]
    drive.run(twins)
    (chunk,) = [chunk for plan in drive.plans for chunk in plan.chunks if chunk.request == 1]
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (prompt - 4, 4, True)


def test_b4_a_longer_prompt_hits_blocks_of_generated_tokens() -> None:
    """CASES B4: the last full block counts as soon as one more token stays to compute."""
    drive = Drive(CACHED, limits())
    first = scripted(0, 6, 7, family=1, shared=40, block_size=4)
    drive.run([first, scripted(1, 13, 1, arrival_ns=100, family=1, shared=40, block_size=4)])
    # 6 + 7 tokens, the last of them never computed: three full blocks of prompt and output.
    assert drive.states[1].num_prefix_hit_tokens == 12


@DEPTHS
def test_b5_a_preempted_request_is_prefilled_whatever_it_has_put_out(depth: int) -> None:
    """CASES B5: known tokens, outputs included, are recomputed in chunks of the budget; only the last samples."""
    chosen = policy("mixed", watermark=0.0, batching=PreemptAt(request=0, outputs=7))
    drive = Drive(chosen, limits(num_tokens=5), depth)
    drive.run([scripted(0, 4, 9)])
    chunks = [chunk for plan in drive.plans for chunk in plan.chunks]
    assert [(c.start, c.num_tokens, c.samples) for c in chunks] == [
        (0, 4, True),
        (0, 5, False),
        (5, 5, False),
        (10, 1, True),
    ]


@DEPTHS
@pytest.mark.parametrize("first_to_go", [0, 1])
def test_b6_two_requests_with_one_new_prefix_in_the_same_step(depth: int, first_to_go: int) -> None:
    """CASES B6: both compute it; whoever is freed first, the key never points to other content."""
    drive = Drive(CACHED, limits(num_blocks=8, num_tokens=32), depth)
    twins = [scripted(i, 9, 6, family=1, shared=9, block_size=4) for i in range(2)]
    later = scripted(2, 9, 4, arrival_ns=50, family=1, shared=9, block_size=4)
    stranger = scripted(3, 16, 2, arrival_ns=30, family=2, shared=16, block_size=4)
    drive.run([*twins, later, stranger], aborts={first_to_go: 20})
    tables = dict(drive.plans[0].new_blocks)
    assert not set(tables[0]) & set(tables[1])
    assert drive.states[0].num_prefix_hit_tokens == drive.states[1].num_prefix_hit_tokens == 0
    assert drive.states[2].num_prefix_hit_tokens in (0, 8)


@DEPTHS
def test_b7_an_evicted_block_loses_its_key(depth: int) -> None:
    """CASES B7: fill the pool, evict, reuse for other text, send the first prompt again: a miss."""
    drive = Drive(CACHED, limits(num_blocks=4), depth)
    again = {"family": 1, "shared": 12, "block_size": 4}
    drive.run(
        [
            scripted(0, 12, 1, **again),
            # Still cached.
            scripted(1, 12, 1, arrival_ns=100, **again),
            # Needs the whole pool.
            scripted(2, 16, 1, arrival_ns=200, block_size=4),
            scripted(3, 12, 1, arrival_ns=300, **again),
        ]
    )
    assert [drive.states[i].num_prefix_hit_tokens for i in range(4)] == [0, 8, 0, 0]


def test_b7_the_longest_released_block_is_evicted_first_and_a_tail_before_its_head() -> None:
    """CASES B7: what stays is the newest prefix and the heads of older ones."""
    drive = Drive(CACHED, limits(num_blocks=8))
    old, new = {"family": 1, "shared": 12, "block_size": 4}, {"family": 2, "shared": 12, "block_size": 4}
    drive.run(
        [
            scripted(0, 12, 1, **old),
            scripted(1, 12, 1, arrival_ns=100, **new),
            # 4 blocks: 2 that were never used and 2 of the old prefix, its tail first. It has no keys.
            scripted(2, 16, 1, arrival_ns=200),
            scripted(3, 12, 1, arrival_ns=300, **new),
            scripted(4, 12, 1, arrival_ns=400, **old),
        ]
    )
    assert drive.states[3].num_prefix_hit_tokens == 8
    assert drive.states[4].num_prefix_hit_tokens == 4


def colliding(script: Script) -> Script:
    """The script with one key for all its prompt blocks."""
    keys = ("any",) * (script.request.num_prompt_tokens // 4)
    return dataclasses.replace(script, request=dataclasses.replace(script.request, prefix_keys=keys))


@DEPTHS
@pytest.mark.parametrize("prompt", [5, 9, 14])
def test_b8_colliding_keys_keep_the_books_straight(depth: int, prompt: int) -> None:
    """CASES B8: equal keys mean equal text, and keeping that promise is the engine's duty (collision-safe hash).

    The policy cannot see tokens: where other texts have the same key, it serves a foreign block, and one block
    twice to a prompt whose own blocks collide. What it guarantees even then is that references balance, no
    block is written while another holds it, and all drains.
    """
    drive = Drive(CACHED, limits(num_blocks=10), depth, content=False)
    drive.run([colliding(scripted(i, prompt, 3, arrival_ns=15 * i)) for i in range(6)])
    assert any(plan.num_prefix_hit_tokens for plan in drive.plans)


def test_b8_one_different_token_means_a_miss_from_there_on() -> None:
    """CASES B8: hits only on equal keys, as the longest chain from the start."""
    drive = Drive(CACHED, limits())
    drive.run(
        [
            scripted(0, 16, 1, family=1, shared=16, block_size=4),
            # The same 9 tokens, then its own.
            scripted(1, 16, 1, arrival_ns=100, family=1, shared=9, block_size=4),
            scripted(2, 16, 1, arrival_ns=200, family=1, shared=3, block_size=4),
        ]
    )
    assert [drive.states[i].num_prefix_hit_tokens for i in range(3)] == [0, 8, 0]


@DEPTHS
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_b9_abort_after_each_chunk_and_send_again(depth: int, committed: bool, num_chunks: int) -> None:
    """CASES B9: blocks may be hit only once the step that fills them has committed."""
    drive = Drive(CACHED, limits(num_tokens=5), depth)
    drive.add(scripted(0, 18, 4, family=1, shared=18, block_size=4))
    for step in range(num_chunks):
        drive.schedule()
        if step < num_chunks - 1 or committed:
            drive.commit()
    drive.abort(0)
    while drive.in_flight:
        drive.commit()
    twin = scripted(1, 18, 4, arrival_ns=drive.now_ns, family=1, shared=18, block_size=4)
    drive.run([twin])
    first = next(chunk for plan in drive.plans for chunk in plan.chunks if chunk.request == 1)
    done = min(5 * num_chunks, 17) // 4 * 4
    assert first.start == done if committed else first.start <= done


def test_b9_nothing_is_published_while_its_step_is_in_flight() -> None:
    """CASES B9: at depth 1 a twin planned behind the step that fills the prefix computes it itself."""
    drive = Drive(CACHED, limits(), 1)
    drive.add(scripted(0, 9, 4, family=1, shared=9, block_size=4))
    drive.schedule()
    drive.add(scripted(1, 9, 4, family=1, shared=9, block_size=4))
    assert drive.schedule().num_prefix_hit_tokens == 0
    drive.commit()
    drive.now_ns += STEP_NS
    drive.add(scripted(2, 9, 4, family=1, shared=9, block_size=4))
    assert drive.schedule().num_prefix_hit_tokens == 8


def test_b11_the_discarded_token_after_a_stop_is_never_hit() -> None:
    """CASES B11: the row behind a stop fills a block, but its key is never known."""
    drive = Drive(CACHED, limits(), 1)
    family = {"family": 1, "shared": 20, "block_size": 4}
    drive.run([scripted(0, 3, 5, stop_after=1, **family), scripted(1, 9, 1, arrival_ns=100, **family)])
    # Step 1 computed the first output at position 3 although request 0 had stopped with it.
    assert drive.plans[1].filled == ((0, 0),)
    assert drive.scheduler.num_discarded_tokens == 1
    assert drive.states[1].num_prefix_hit_tokens == 0


def test_b11_a_token_that_was_computed_before_the_stop_counts() -> None:
    """CASES B11, the other side: the same block is hit when its last token was computed for good."""
    drive = Drive(CACHED, limits(), 1)
    family = {"family": 1, "shared": 20, "block_size": 4}
    drive.run([scripted(0, 3, 5, stop_after=2, **family), scripted(1, 9, 1, arrival_ns=100, **family)])
    assert drive.states[1].num_prefix_hit_tokens == 4
