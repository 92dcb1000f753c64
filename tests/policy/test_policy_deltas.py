"""A plan says what a worker must know, once, and nothing about requests that the worker does not know."""

from dataclasses import dataclass

from policy_driver import Drive
from policy_scripts import scripted

from pagedserve.policy import Limits, Step, policy


def limits(num_blocks: int) -> Limits:
    """A pool of blocks of 2."""
    return Limits(12, 3, max_model_len=32, block_size=2, num_blocks=num_blocks)


@dataclass
class Scripted:
    """Calls the verbs named for each step number, then goes on like ``mixed``."""

    verbs: dict[int, tuple[str, ...]]

    def compose(self, step: Step) -> None:
        """``preempt`` and ``admit`` act on the newest running and the first waiting request."""
        for verb in self.verbs.get(step.number, ("decode", "prefill", "admit")):
            if verb == "decode":
                step.decode()
            elif verb == "prefill":
                step.continue_prefills()
            elif verb == "admit":
                step.admit_in_order()
            else:
                step.preempt(list(step.running)[-1])


def test_a_request_that_departs_is_not_also_called_preempted() -> None:
    """Preempted by a plan that stayed empty, with its last token in flight, it ends before the next plan."""
    drive = Drive(policy("mixed", watermark=0.0), limits(4), 1)
    drive.run([scripted(0, 3, 4), scripted(1, 3, 4, stop_after=2)])
    told = next(plan for plan in drive.plans if 1 in plan.departed)
    assert drive.states[1].num_preemptions == 1
    assert told.preempted == ()
    assert 1 in told.left


def test_an_empty_plans_preemption_is_told_with_the_next() -> None:
    """The victim lives on: the plan that is launched next names it."""
    drive = Drive(policy("mixed", watermark=0.0), limits(4), 1)
    drive.run([scripted(0, 3, 4), scripted(1, 3, 4)])
    assert [plan.preempted for plan in drive.plans if plan.preempted] == [(1,)]
    assert drive.states[1].num_preemptions == 1


def test_a_first_admission_undone_in_its_step_leaves_no_trace() -> None:
    """The worker has never heard of request 1, which gave its blocks back to 0 before the plan was made."""
    drive = Drive(policy("mixed", batching=Scripted({2: ("admit", "decode")}), watermark=0.0), limits(4))
    drive.run([scripted(0, 3, 4), scripted(1, 3, 2, arrival_ns=15)])
    undone = drive.plans[2]
    assert (undone.chunks, undone.decodes) == ((), (0,))
    assert (undone.new_requests, undone.preempted) == ((), ())
    assert dict(undone.new_blocks).keys() == {0}
    assert drive.states[1].first_schedule_ns == drive.now_ns - 20


def test_a_resumption_undone_in_its_step_counts_no_hit_and_no_recomputation() -> None:
    """Request 1 hits its cached blocks, and loses them again before the plan is made."""
    rule = Scripted({1: ("preempt", "decode"), 2: ("admit", "decode")})
    drive = Drive(policy("vllm_v1", batching=rule), limits(5))
    drive.run([scripted(0, 3, 9, block_size=2), scripted(1, 4, 5, block_size=2)])
    undone = drive.plans[2]
    assert (undone.chunks, undone.decodes) == ((), (0,))
    assert undone.num_prefix_hit_tokens == 0
    assert undone.num_recomputed_tokens == 0


def test_hits_taken_and_lost_do_not_count_as_computed_before() -> None:
    """Request 1 hit 4 tokens of another request's and lost them; computing them later is no recomputation."""
    family = {"family": 1, "shared": 4, "block_size": 2}
    rule = Scripted({3: ("admit", "decode")})
    drive = Drive(policy("vllm_v1", batching=rule), limits(7))
    drive.run(
        [
            scripted(9, 4, 1, **family),
            # Grows until it has evicted the cached blocks of request 9.
            scripted(0, 5, 10, arrival_ns=10),
            scripted(1, 7, 1, arrival_ns=25, **family),
        ]
    )
    assert drive.plans[3].decodes == (0,)
    assert drive.states[1].num_preemptions == 1
    assert drive.states[1].num_prefix_hit_tokens == 0
    assert drive.states[1].num_recomputed_tokens == 0


def test_a_victim_gives_back_what_the_step_gave_it() -> None:
    """Request 1 gets a chunk and a block, then loses both to the decode of 0; its tokens may be spent again."""
    rule = Scripted({2: ("prefill", "decode", "admit")})
    chosen = policy("mixed", batching=rule, watermark=0.0, scheduler_reserve_full_isl=False)
    drive = Drive(chosen, Limits(4, 3, max_model_len=32, block_size=2, num_blocks=4))
    drive.run([scripted(0, 3, 3), scripted(1, 6, 1)])
    # Step 0: 0:0+3* 1:0+1; step 1: 1:1+3 beside the decode of 0; the pool is full.
    plan = drive.plans[2]
    assert (plan.chunks, plan.decodes, plan.preempted) == ((), (0,), (1,))
    assert dict(plan.new_blocks).keys() == {0}


def test_the_group_is_one_object_until_it_changes() -> None:
    """Also across steps that do not run it."""
    drive = Drive(policy("prefill_first", watermark=0.0), limits(16), 1)
    drive.run([scripted(0, 3, 9), scripted(1, 3, 9), scripted(2, 5, 1, arrival_ns=25)])
    groups = [plan.decodes for plan in drive.plans if plan.decodes]
    skipped = [plan for plan in drive.plans if not plan.decodes]
    assert len(skipped) == 2
    assert all(group is groups[0] for group in groups)
    assert sum(bool(plan.joined) for plan in drive.plans) == 1
