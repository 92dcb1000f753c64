"""Plans of each batching rule on tiny traces, worked out by hand.

A line is one step: chunks (request:start+tokens, a star when it samples) | decodes | new blocks | preempted.
Free blocks are given lowest first at the start; a released table is given out again before the others.
"""

import pytest
from policy_driver import Drive
from policy_parts import OldestVictim
from policy_scripts import Script, scripted

from pagedserve.policy import Limits, policy


def plans(drive: Drive, *scripts: Script) -> list[str]:
    """Serve the scripts; return the plans as text."""
    drive.run(scripts)
    return drive.lines


def limits(num_blocks: int, block_size: int = 4, num_seqs: int = 3, num_tokens: int = 8) -> Limits:
    """Limits small enough to follow by hand."""
    return Limits(num_tokens, num_seqs, max_model_len=32, block_size=block_size, num_blocks=num_blocks)


def test_mixed_shares_the_budget_between_decodes_and_chunks() -> None:
    drive = Drive(policy("mixed", watermark=0.0), limits(8))
    assert plans(drive, scripted(0, 6, 3), scripted(1, 5, 2), scripted(2, 3, 2, arrival_ns=10)) == [
        # 6 of 8 tokens for request 0, the other 2 begin request 1, whose first chunk needs one block.
        "0:0+6* 1:0+2 | - | 0=0,1 1=2 | -",
        # Decodes first, then the chunk in progress, then the newcomer.
        "1:2+3* 2:0+3* | 0 | 1=3 2=4 | -",
        # All reach their output limit: 0 its third token, 1 and 2 their second.
        "- | 0 1 2 | - | -",
    ]


def test_prefill_first_does_not_mix_and_cuts_only_what_exceeds_the_budget() -> None:
    drive = Drive(policy("prefill_first", watermark=0.0), limits(8))
    assert plans(drive, scripted(0, 6, 3), scripted(1, 5, 2), scripted(2, 12, 1, arrival_ns=10)) == [
        # 2 tokens are left: request 1 is not cut to fit.
        "0:0+6* | - | 0=0,1 | -",
        # Prompts come before the decode of 0. Request 2 does not fit behind 1.
        "1:0+5* | - | 1=2,3 | -",
        # Request 2 is longer than any step's budget, so it is cut.
        "2:0+8 | - | 2=4,5 | -",
        "2:8+4* | - | 2=6 | -",
        # No prompt is left.
        "- | 0 1 | - | -",
        "- | 0 | - | -",
    ]


def test_static_batch_keeps_its_seats_until_it_has_wholly_finished() -> None:
    drive = Drive(policy("static", watermark=0.0), limits(8, num_seqs=2))
    assert plans(drive, scripted(0, 3, 3), scripted(1, 6, 1), scripted(2, 2, 2)) == [
        "0:0+3* 1:0+5 | - | 0=0 1=1,2 | -",
        # Prompts of the batch first: 0 waits with its decode.
        "1:5+1* | - | - | -",
        # Request 1 is done; 2 waits although a seat, tokens and blocks are free.
        "- | 0 | - | -",
        # The block that request 1 gave back last is given out first.
        "- | 0 | 0=1 | -",
        "2:0+2* | - | 2=0 | -",
        "- | 2 | - | -",
    ]


def test_static_batch_forms_over_several_steps_when_tokens_run_out() -> None:
    drive = Drive(policy("static", watermark=0.0), limits(8, num_seqs=3))
    scripts = [scripted(0, 4, 2), scripted(1, 4, 2), scripted(2, 4, 2), scripted(3, 1, 1, arrival_ns=5)]
    assert plans(drive, *scripts) == [
        "0:0+4* 1:0+4* | - | 0=0 1=1 | -",
        # Request 2 waited when the batch formed, so it belongs to it; 3 came later and does not.
        "2:0+4* | - | 2=2 | -",
        "- | 0 1 2 | 0=3 1=4 2=5 | -",
        # Tables are released in the order of ending, each with its first block on top.
        "3:0+1* | - | 3=2 | -",
    ]


def test_serial_runs_one_request_at_a_time() -> None:
    drive = Drive(policy("serial"), limits(8))
    assert plans(drive, scripted(0, 3, 3), scripted(1, 12, 1), scripted(2, 2, 2)) == [
        "0:0+3* | - | 0=0 | -",
        "- | 0 | - | -",
        # The fifth token (position 4) needs a second block.
        "- | 0 | 0=1 | -",
        "1:0+8 | - | 1=0,1 | -",
        "1:8+4* | - | 1=2 | -",
        "2:0+2* | - | 2=0 | -",
        "- | 2 | - | -",
    ]


@pytest.mark.parametrize(("victim", "loser"), [("newest", 1), (OldestVictim(), 0)])
def test_recompute_preemption(victim: object, loser: int) -> None:
    drive = Drive(policy("mixed", watermark=0.0, victim=victim), limits(4, block_size=2))
    table = plans(drive, scripted(0, 3, 4), scripted(1, 3, 3))
    expected = [
        "0:0+3* 1:0+3* | - | 0=0,1 1=2,3 | -",
        # Position 3 is the last slot of both tables.
        "- | 0 1 | - | -",
    ]
    if loser == 1:
        expected += [
            # Both need a third block. Request 0 asks first and 1, the newest, gives way.
            "- | 0 | 0=2 | 1",
            # Request 1 needs 3 blocks for its 5 known tokens; one is free.
            "- | 0 | - | -",
            # It resumes with its prompt and two outputs and samples the third.
            "1:0+5* | - | 1=0,1,2 | -",
        ]
        assert drive.num_recomputed == 4
    else:
        expected += [
            # Request 0 asks first, is the oldest and gives way to itself; 1 finishes with block 0.
            "- | 1 | 1=0 | 0",
            "0:0+5* | - | 0=2,3,0 | -",
            "- | 0 | - | -",
        ]
        assert drive.num_recomputed == 4
    assert table == expected


def test_overlap_discards_the_row_behind_a_stop_and_holds_its_blocks() -> None:
    drive = Drive(policy("mixed", watermark=0.0), limits(4), depth=1)
    assert plans(drive, scripted(0, 3, 4, stop_after=2), scripted(1, 2, 1, arrival_ns=5)) == [
        "0:0+3* | - | 0=0 | -",
        # Planned before step 0 is done: its token is known to come.
        "- | 0 | - | -",
        # Request 1 came during step 0 and joins step 2. Row 0 turns out to be one too many: 0 stops with step 1.
        "1:0+2* | 0 | 0=1 1=2 | -",
    ]
    assert drive.scheduler.num_discarded_tokens == 1
    assert drive.emitted == {0: [0, 1], 1: [2]}


def test_overlap_foresees_a_finish_by_length() -> None:
    drive = Drive(policy("mixed", watermark=0.0), limits(4), depth=1)
    assert plans(drive, scripted(0, 3, 2), scripted(1, 2, 1, arrival_ns=5)) == [
        "0:0+3* | - | 0=0 | -",
        "- | 0 | - | -",
        # Block 0 is still held: step 1 is in flight when this is planned.
        "1:0+2* | - | 1=1 | -",
    ]
    assert drive.scheduler.num_discarded_tokens == 0


def test_prefix_hits_are_told_as_the_first_new_blocks() -> None:
    drive = Drive(policy("vllm_v1"), limits(8))
    first = scripted(0, 8, 1, family=7, shared=8, block_size=4)
    second = scripted(1, 10, 1, arrival_ns=10, family=7, shared=8, block_size=4)
    assert plans(drive, first, second) == [
        "0:0+8* | - | 0=0,1 | -",
        # Two blocks are hit, so the chunk starts at token 8, in a block of its own.
        "1:8+2* | - | 1=0,1,2 | -",
    ]
    assert [plan.num_prefix_hit_tokens for plan in drive.plans] == [0, 8]
    assert drive.states[1].num_prefix_hit_tokens == 8


def test_contiguous_limit_reserves_side_by_side_and_holds_back_the_queue() -> None:
    drive = Drive(policy("mixed", allocator="contiguous_limit", watermark=0.0), limits(6, block_size=2))
    assert plans(drive, scripted(0, 3, 3), scripted(1, 4, 4), scripted(2, 1, 1)) == [
        # 6 tokens are 3 blocks for request 0; request 1 needs 4 and holds back 2, which would fit.
        "0:0+3* | - | 0=0,1,2 | -",
        "- | 0 | - | -",
        "- | 0 | - | -",
        "1:0+4* 2:0+1* | - | 1=0,1,2,3 2=4 | -",
        "- | 1 | - | -",
        "- | 1 | - | -",
        "- | 1 | - | -",
    ]


def test_contiguous_max_reserves_the_models_length() -> None:
    within = Limits(8, 3, max_model_len=6, block_size=2, num_blocks=7)
    drive = Drive(policy("mixed", allocator="contiguous_max"), within)
    assert plans(drive, scripted(0, 1, 1), scripted(1, 1, 1), scripted(2, 1, 1)) == [
        # 3 blocks each, whatever they need; the seventh block serves nobody.
        "0:0+1* 1:0+1* | - | 0=0,1,2 1=3,4,5 | -",
        "2:0+1* | - | 2=0,1,2 | -",
    ]


def test_watermark_keeps_blocks_from_newcomers_only_while_others_run() -> None:
    drive = Drive(policy("mixed", watermark=0.2), limits(10, block_size=2, num_tokens=32))
    assert plans(drive, scripted(0, 8, 2), scripted(1, 10, 1), scripted(2, 18, 1, arrival_ns=10)) == [
        # 6 blocks are free, 2 must stay: request 1 wants 5.
        "0:0+8* | - | 0=0,1,2,3 | -",
        "- | 0 | 0=4 | -",
        "1:0+10* | - | 1=0,1,2,3,4 | -",
        # Request 2 takes 9 of 10 blocks: nobody else runs.
        "2:0+18* | - | 2=0,1,2,3,4,5,6,7,8 | -",
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_admission_gate_is_the_whole_prompt_or_the_first_chunk(whole: bool) -> None:
    chosen = policy("mixed", watermark=0.0, scheduler_reserve_full_isl=whole)
    drive = Drive(chosen, limits(4, block_size=2, num_tokens=4))
    table = plans(drive, scripted(0, 3, 3), scripted(1, 6, 1))
    if whole:
        # Request 1 needs 3 blocks and finds 2, until request 0 has gone.
        expected = [
            "0:0+3* | - | 0=0,1 | -",
            "- | 0 | - | -",
            "- | 0 | 0=2 | -",
            "1:0+4 | - | 1=0,1 | -",
            "1:4+2* | - | 1=2 | -",
        ]
    else:
        # It begins at once, and has to give way when request 0 needs its third block.
        expected = [
            "0:0+3* 1:0+1 | - | 0=0,1 1=2 | -",
            "1:1+3 | 0 | 1=3 | -",
            "- | 0 | 0=2 | 1",
            "1:0+4 | - | 1=0,1 | -",
            "1:4+2* | - | 1=2 | -",
        ]
    assert table == expected
    assert drive.num_recomputed == (0 if whole else 4)
