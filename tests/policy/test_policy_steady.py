"""``steady_for``: while it promises, nothing but the decode group runs, and plans can be foreseen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import STEP_NS, Drive
from policy_parts import SmallChunks
from policy_scripts import Script, scripted

from pagedserve.policy import Limits, StepPlan, policy

RULES = ("serial", "static", "prefill_first", "mixed")


def limits(num_blocks: int, num_tokens: int = 8, num_seqs: int = 4) -> Limits:
    """A pool of blocks of 2."""
    return Limits(num_tokens, num_seqs, max_model_len=64, block_size=2, num_blocks=num_blocks)


class Promises:
    """Asks ``steady_for`` after every call and holds the plans that follow to every answer."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.open: list[tuple[int, tuple[int, ...] | None]] = []
        self.num_kept = 0

    def ask(self) -> int:
        """A new promise: for so many coming steps."""
        number = self.drive.scheduler.steady_for(self.drive.now_ns)
        assert number >= 0
        if number:
            self.open.append((number, None))
        return number

    def schedule(self) -> StepPlan:
        """Schedule; every open promise holds for this plan."""
        plan = self.drive.schedule()
        still: list[tuple[int, tuple[int, ...] | None]] = []
        for remaining, decodes in self.open:
            assert plan, "a step was promised and none was planned"
            assert not plan.chunks
            assert not plan.preempted
            assert not plan.new_requests
            if decodes is not None:
                assert plan.decodes is decodes
                assert not plan.joined
                assert not plan.left
                assert not plan.departed
            self.num_kept += 1
            if remaining > 1:
                still.append((remaining - 1, plan.decodes))
        self.open = still
        return plan

    def run(self, scripts: list[Script], max_steps: int = 500) -> None:
        """Arrivals by step number; each ends every promise."""
        todo = sorted(scripts, key=lambda script: script.request.arrival_ns, reverse=True)
        drive = self.drive
        for _ in range(max_steps):
            while todo and todo[-1].request.arrival_ns <= drive.now_ns:
                drive.add(todo.pop())
                self.open.clear()
            planned = self.schedule()
            self.ask()
            if len(drive.in_flight) > drive.depth or (drive.in_flight and not planned):
                drive.now_ns += STEP_NS
                drive.commit()
                self.ask()
            elif not planned:
                if not todo:
                    break
                drive.now_ns += STEP_NS
        drive.check_drained()


@pytest.mark.parametrize("rule", [*RULES, SmallChunks()])
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=6
    ),
    num_blocks=st.integers(6, 40),
    num_tokens=st.integers(4, 16),
    num_seqs=st.integers(1, 4),
    depth=st.integers(0, 1),
    whole=st.booleans(),
)
def test_every_promise_is_kept(
    rule: object,
    lengths: list[tuple[int, int, int]],
    num_blocks: int,
    num_tokens: int,
    num_seqs: int,
    depth: int,
    whole: bool,
) -> None:
    # First-chunk admission with prefill_first at depth 1 has a test of its own for progress.
    gate = whole or rule == "prefill_first"
    chosen = policy("mixed", batching=rule, watermark=0.0, scheduler_reserve_full_isl=gate)
    promises = Promises(Drive(chosen, limits(num_blocks, num_tokens, num_seqs), depth))
    promises.run(
        [
            scripted(i, min(prompt, 2 * num_blocks), most, arrival_ns=STEP_NS * at)
            for i, (prompt, most, at) in enumerate(lengths)
        ]
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_lone_request_is_steady_until_its_last_round(rule: str, depth: int) -> None:
    promises = Promises(Drive(policy(rule), limits(64), depth))
    promises.drive.add(scripted(0, 3, 20))
    promises.schedule()
    # 19 decodes follow; the last of them ends the request and is not promised.
    assert promises.ask() == 18
    promises.schedule() if depth else promises.drive.commit()
    assert promises.ask() == 18 - depth


def test_what_waits_is_steady_only_where_the_rule_says_so() -> None:
    promised: dict[str, int] = {}
    for rule in RULES:
        promises = Promises(Drive(policy(rule), limits(64, num_seqs=1)))
        promises.drive.add(scripted(0, 3, 20))
        promises.drive.add(scripted(1, 3, 20))
        promises.schedule()
        promised[rule] = promises.ask()
    assert promised == {"serial": 18, "static": 18, "prefill_first": 0, "mixed": 0}


def test_a_static_batch_that_still_forms_is_not_steady() -> None:
    """The token budget ended with the second of three prompts: the third follows in the next step."""
    promises = Promises(Drive(policy("static"), limits(64)))
    for i in range(3):
        promises.drive.add(scripted(i, 4, 10))
    promises.schedule()
    promises.drive.commit()
    promises.ask()
    plan = promises.schedule()
    assert [chunk.request for chunk in plan.chunks] == [2]


def test_a_promise_ends_before_blocks_run_out() -> None:
    promises = Promises(Drive(policy("mixed", watermark=0.0), limits(12)))
    for i in range(2):
        promises.drive.add(scripted(i, 4, 20))
    promises.schedule()
    promises.drive.commit()
    # 8 blocks are free for 2 members: 4 each, of 2 tokens.
    assert promises.ask() == 8
    for _ in range(8):
        promises.schedule()
        promises.drive.commit()
    assert promises.num_kept == 8


def test_rules_that_say_nothing_are_never_steady() -> None:
    promises = Promises(Drive(policy("mixed", batching=SmallChunks()), limits(64)))
    promises.drive.add(scripted(0, 3, 20))
    promises.schedule()
    assert promises.ask() == 0
