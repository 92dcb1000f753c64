"""Faulty parts are found out before a runner or a clock sees their plan: IllegalPlan names class and numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from policy_driver import Drive
from policy_parts import PreemptAt
from policy_scripts import scripted

from pagedserve.policy import IllegalMove, IllegalPlan, Limits, RequestState, Status, Step, policy
from pagedserve.policy.blocks import PagedAllocator


def limits(num_blocks: int = 8) -> Limits:
    """8 tokens a step, 2 seats."""
    return Limits(8, 2, max_model_len=32, block_size=2, num_blocks=num_blocks)


@dataclass
class Rule:
    """A batching rule made of a function; after ``good_steps`` steps of ``mixed``."""

    fault: Callable[[Step], object]
    good_steps: int = 0

    def compose(self, step: Step) -> None:
        """The fault, or ``mixed``."""
        if step.number >= self.good_steps:
            self.fault(step)
            return
        step.decode()
        step.continue_prefills()
        step.admit_in_order()


def run_rule(fault: Callable[[Step], object], good_steps: int = 0, victim: object = "newest") -> None:
    """Two requests that fill the seats, a third that waits, under a faulty rule."""
    drive = Drive(policy("mixed", batching=Rule(fault, good_steps), victim=victim), limits(num_blocks=12))
    drive.run([scripted(0, 5, 6), scripted(1, 13, 6), scripted(2, 3, 6)])


def first_running(step: Step) -> RequestState:
    """The request admitted first."""
    return next(iter(step.running))


def test_decodes_behind_a_spent_budget() -> None:
    def fault(step: Step) -> None:
        # 8 of the 10 tokens that request 1 has left; nothing remains for the decode of 0.
        step.continue_prefills()
        step.decode()

    with pytest.raises(IllegalPlan, match=r"Rule asked for 1 tokens; the step has 0 left"):
        run_rule(fault, good_steps=1)


@pytest.mark.parametrize("budget", ["num_tokens", "num_seats"])
def test_a_budget_is_not_for_writing(budget: str) -> None:
    with pytest.raises(AttributeError, match=budget):
        run_rule(lambda step: setattr(step, budget, 100))


def test_nobody_is_admitted_without_a_seat_or_a_token() -> None:
    admitted: list[int] = []

    def eager(step: Step) -> None:
        admitted.extend(step.admit(state, 3) for state in step.waiting())
        raise StopIteration

    with pytest.raises(StopIteration):
        run_rule(eager)
    # Two seats; the budget would suffice for 2 tokens more.
    assert admitted == [3, 3, 0]


def test_decoding_twice() -> None:
    def fault(step: Step) -> None:
        step.decode()
        step.decode()

    with pytest.raises(IllegalPlan, match=r"Rule.*decodes.*twice"):
        run_rule(fault, good_steps=1)


def test_a_chunk_of_a_waiting_request() -> None:
    def fault(step: Step) -> None:
        step.chunk(step.waiting()[-1], 3)

    with pytest.raises(IllegalPlan, match=r"Rule.*3 tokens of request 2.*waiting"):
        run_rule(fault)


def test_a_chunk_of_a_decoding_request() -> None:
    with pytest.raises(IllegalPlan, match=r"Rule.*request 0.*running"):
        run_rule(lambda step: step.chunk(first_running(step), 1), good_steps=1)


def test_two_chunks_of_one_request_in_a_step() -> None:
    def fault(step: Step) -> None:
        (state,) = step.prefilling()
        step.chunk(state, 1)
        step.chunk(state, 1)

    with pytest.raises(IllegalPlan, match=r"Rule.*request 1"):
        run_rule(fault, good_steps=1)


def test_admitting_a_running_request() -> None:
    with pytest.raises(IllegalPlan, match=r"Rule admitted request 0, which is running"):
        run_rule(lambda step: step.admit(first_running(step)), good_steps=1)


@pytest.mark.parametrize("num_tokens", [0, -3])
def test_less_than_a_token(num_tokens: int) -> None:
    def admit(step: Step) -> None:
        step.admit(step.waiting()[0], num_tokens)

    def chunk(step: Step) -> None:
        step.chunk(step.prefilling()[0], num_tokens)

    with pytest.raises(IllegalPlan, match=rf"Rule.*request 0.*{num_tokens}"):
        run_rule(admit)
    with pytest.raises(IllegalPlan, match=rf"Rule.*{num_tokens} tokens of request 1"):
        run_rule(chunk, good_steps=1)


def test_preempting_a_waiting_request() -> None:
    with pytest.raises(IllegalPlan, match=r"Rule preempted request 2, which is waiting"):
        run_rule(lambda step: step.preempt(step.waiting()[0]), good_steps=1)


def test_scheduling_nothing_while_blocks_are_held() -> None:
    with pytest.raises(IllegalPlan, match=r"Rule scheduled nothing although 2 requests"):
        run_rule(lambda step: None, good_steps=1)


class ForeignVictim:
    """Picks a request that runs no longer."""

    def __init__(self) -> None:
        self.seen: list[RequestState] = []

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """The first victim again."""
        self.seen.append(candidates[-1])
        return self.seen[0]


def test_a_victim_that_is_not_a_candidate() -> None:
    within = Limits(9, 3, max_model_len=32, block_size=2, num_blocks=6)
    drive = Drive(policy("mixed", victim=ForeignVictim(), watermark=0.0), within)
    # All need a third block in step 2: request 2 gives way to 0 and is picked again when 1 still lacks one.
    with pytest.raises(IllegalPlan, match=r"ForeignVictim picked request 2, which is preempted"):
        drive.run([scripted(i, 3, 7) for i in range(3)])


def test_nobody_as_victim_makes_the_needy_wait_and_is_named_when_nothing_can_go_on() -> None:
    class NoVictim:
        def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
            return None

    drive = Drive(policy("mixed", victim=NoVictim(), watermark=0.0), limits(num_blocks=5))
    drive.run([scripted(0, 3, 7), scripted(1, 3, 2)])
    assert drive.scheduler.num_preemptions == 0
    drive = Drive(policy("mixed", victim=NoVictim(), watermark=0.0), limits(num_blocks=4))
    with pytest.raises(IllegalPlan, match=r"scheduled nothing although 2 requests"):
        drive.run([scripted(0, 3, 7), scripted(1, 3, 7)])


class OutOfRange(PagedAllocator):
    """Gives a block that the pool does not have."""

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """The last block's number is off by the pool's size."""
        blocks = super().grow(state, num_tokens)
        if blocks:
            state.block_table[-1] += self.num_blocks
        return tuple(state.block_table[-len(blocks) :]) if blocks else ()


class TooFew(PagedAllocator):
    """Gives one block less than asked for."""

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Room for one block of tokens less."""
        return super().grow(state, num_tokens - self.block_size)


class Owned(PagedAllocator):
    """Gives request 1 the block of request 0."""

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Block 0, whoever has it."""
        blocks = super().grow(state, num_tokens)
        if blocks and state.id == 1:
            state.block_table[-1] = 0
            return (*blocks[:-1], 0)
        return blocks


class Twice(PagedAllocator):
    """Gives one block for two places of a table."""

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """The first block again and again."""
        blocks = super().grow(state, num_tokens)
        if blocks:
            state.block_table[-len(blocks) :] = [blocks[0]] * len(blocks)
        return blocks[:1] * len(blocks)


class NoFence(PagedAllocator):
    """Frees at once what a step in flight still writes."""

    def release(self, state: RequestState, fence: int | None) -> None:
        """As if nothing were in flight."""
        super().release(state, None)


@pytest.mark.parametrize(
    ("allocator", "numbers"),
    [
        (OutOfRange(), r"request 0.*10\b.*\b7\b"),
        (TooFew(), r"request 0.*2 blocks of 2 for 5 tokens"),
        (Owned(), r"request 1.*\b0\b"),
        (Twice(), r"request 0.*\(0, 0, 0\)"),
    ],
)
def test_an_allocators_grant_is_checked(allocator: PagedAllocator, numbers: str) -> None:
    drive = Drive(policy("mixed", allocator=allocator), limits())
    with pytest.raises(IllegalPlan, match=rf"{type(allocator).__name__} .*{numbers}"):
        drive.run([scripted(0, 5, 6), scripted(1, 5, 6)])


def test_a_block_that_a_step_in_flight_touches_is_not_given_out() -> None:
    drive = Drive(policy("mixed", allocator=NoFence(), watermark=0.0), limits(num_blocks=3), 1)
    with pytest.raises(IllegalPlan, match=r"NoFence gave request 1.*steps in flight.*1"):
        drive.run([scripted(0, 5, 6), scripted(1, 5, 1, arrival_ns=1)], aborts={0: 5})


def test_an_illegal_move_names_both_statuses() -> None:
    drive = Drive(policy("mixed", batching=PreemptAt(0, 1)), limits())
    drive.run([scripted(0, 2, 1)])
    with pytest.raises(IllegalMove, match=r"request 0 cannot move from finished to running"):
        drive.states[0].move(Status.RUNNING)
