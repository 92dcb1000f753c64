"""Parts of one's own: names and errors of the registry, deep copies, orders that depend on the time."""

from dataclasses import dataclass, field

import pytest
from policy_driver import STEP_NS, Drive
from policy_parts import Ageing, ShortestPromptFirst, SmallChunks, WaitForCompany
from policy_scripts import scripted

from pagedserve.policy import Limits, Policy, RequestState, Step, policy, policy_names
from pagedserve.policy.blocks import PagedAllocator
from pagedserve.policy.contiguous import ContiguousAllocator

LIMITS = Limits(8, 2, max_model_len=32, block_size=2, num_blocks=16)
SCRIPTS = [scripted(i, 4 - i % 3, 5, arrival_ns=3 * i) for i in range(6)]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*serial, static, prefill_first, mixed, vllm_v1"):
        policy("fast")
    with pytest.raises(ValueError, match=r"batching 'fast'.*serial, static, prefill_first, mixed"):
        policy("mixed", batching="fast")
    with pytest.raises(ValueError, match=r"order 'lifo'.*fcfs"):
        policy("mixed", order="lifo")
    with pytest.raises(ValueError, match=r"victim 'oldest'.*newest"):
        Policy(victim="oldest")
    with pytest.raises(ValueError, match=r"allocator 'buddy'.*paged, contiguous_max, contiguous_limit"):
        policy("mixed", allocator="buddy")
    with pytest.raises(ValueError, match=r"'watermrak'.*watermark"):
        policy("mixed", watermrak=0.1)


@pytest.mark.parametrize("watermark", [-0.1, 1.0, 7])
def test_a_watermark_is_a_share(watermark: float) -> None:
    with pytest.raises(ValueError, match=f"watermark is {watermark}"):
        policy("mixed", watermark=watermark)


@pytest.mark.parametrize("field_name", ["max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks"])
def test_limits_name_the_field_and_the_value(field_name: str) -> None:
    with pytest.raises(ValueError, match=f"{field_name} is 0"):
        Limits(**{field_name: 0})
    with pytest.raises(ValueError, match=r"max_num_seqs 9.*max_num_batched_tokens 8"):
        Limits(max_num_batched_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize("name", policy_names())
def test_presets_are_what_their_names_say(name: str) -> None:
    chosen = policy(name)
    assert chosen.name == name
    assert chosen.batching == ("mixed" if name == "vllm_v1" else name)
    vllm = (0.0, True, True) if name == "vllm_v1" else (chosen.watermark, True, False)
    assert (chosen.watermark, chosen.scheduler_reserve_full_isl, chosen.enable_prefix_caching) == vllm


def test_contiguous_allocators_share_nothing() -> None:
    assert not policy("vllm_v1", allocator="contiguous_max").enable_prefix_caching
    with pytest.raises(ValueError, match=r"ContiguousLimit.*enable_prefix_caching"):
        Drive(policy("vllm_v1", allocator="contiguous_limit", enable_prefix_caching=True), LIMITS)
    with pytest.raises(ValueError, match=r"max_model_len 32.*30"):
        Drive(policy("mixed", allocator="contiguous_max"), Limits(8, 2, 32, block_size=2, num_blocks=15))


@dataclass
class Moody:
    """Every part in one, each with a memory that would change a second run."""

    seen: list[int] = field(default_factory=list)

    def compose(self, step: Step) -> None:
        """``mixed``, with admissions only in every second step."""
        self.seen.append(step.number)
        step.decode()
        step.continue_prefills()
        if len(self.seen) % 2 or not step.num_running:
            step.admit_in_order(max_requests=1)

    def key(self, state: RequestState, now_ns: int) -> int:
        """Reverses the order with every call."""
        self.seen.append(state.id)
        return state.id * (-1) ** len(self.seen)

    def pick(self, candidates: list[RequestState], now_ns: int) -> RequestState:
        """Takes turns."""
        self.seen.append(len(candidates))
        return candidates[len(self.seen) % len(candidates)]


class Counting(PagedAllocator):
    """Skips block 0 from its second grant on, for ever."""

    grants: int = 0

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Counts."""
        self.grants += 1
        return super().grow(state, num_tokens)


def test_objects_are_copied_so_that_no_state_leaks_between_runs() -> None:
    rule, order, victim, allocator = Moody(), Moody(), Moody(), Counting()
    chosen = policy("mixed", batching=rule, order=order, victim=victim, allocator=allocator, watermark=0.0)
    tight = Limits(8, 4, max_model_len=32, block_size=2, num_blocks=6)
    drives = [Drive(chosen, tight) for _ in range(2)]
    for drive in drives:
        drive.run(SCRIPTS)
    assert drives[0].plans == drives[1].plans
    assert drives[0].scheduler.num_preemptions > 0
    assert rule.seen == order.seen == victim.seen == []
    assert allocator.grants == 0
    assert not hasattr(allocator, "num_blocks")
    assert drives[0].scheduler.allocator is not drives[1].scheduler.allocator


def test_interleaved_runs_of_one_policy_do_not_touch_each_other() -> None:
    chosen = policy("static", watermark=0.0)
    alone = Drive(chosen, LIMITS)
    alone.run(SCRIPTS)
    drives = [Drive(chosen, LIMITS) for _ in range(2)]
    for script in SCRIPTS:
        for drive in drives:
            drive.now_ns = max(drive.now_ns, script.request.arrival_ns)
            drive.add(script)
            if drive.schedule():
                drive.commit()
    assert drives[0].plans == drives[1].plans
    assert drives[0].scheduler.batching is not drives[1].scheduler.batching


def admitted(drive: Drive) -> list[int]:
    """Requests in the order of their first chunk."""
    return [request.id for plan in drive.plans for request in plan.new_requests]


def test_a_fixed_order_sorts_the_queue() -> None:
    drive = Drive(policy("serial", order=ShortestPromptFirst()), LIMITS)
    drive.run([scripted(i, prompt, 2) for i, prompt in enumerate((7, 3, 9, 1, 3))])
    # Ties follow the order of arrival.
    assert admitted(drive) == [3, 1, 4, 0, 2]


def test_an_order_may_depend_on_the_time() -> None:
    scripts = [
        scripted(0, 8, 2),
        scripted(1, 20, 2),
        *(scripted(2 + i, 4, 2, arrival_ns=20 * i) for i in range(9)),
    ]
    starves = Drive(policy("serial", order=ShortestPromptFirst()), LIMITS)
    starves.run(scripts)
    assert admitted(starves)[-2:] == [0, 1]
    ages = Drive(policy("serial", order=Ageing(ns_per_token=STEP_NS)), LIMITS)
    ages.run(scripts)
    # Request 2 goes first; after 5 steps request 0 has more credit than newcomers are shorter.
    assert admitted(ages).index(0) < 6
    assert admitted(ages).index(1) < 11
    for earlier, later in zip(admitted(ages), admitted(ages)[1:], strict=False):
        assert earlier != later
    assert sorted(admitted(ages)) == list(range(11))


def test_the_queue_is_sorted_anew_at_every_instant() -> None:
    @dataclass
    class Flip:
        """Smallest id first in even steps, largest in odd ones."""

        def key(self, state: RequestState, now_ns: int) -> int:
            return state.id if now_ns // STEP_NS % 2 == 0 else -state.id

    drive = Drive(policy("serial", order=Flip()), LIMITS)
    drive.run([scripted(i, 2, 1) for i in range(6)])
    assert admitted(drive) == [0, 5, 1, 4, 2, 3]


def test_a_batching_rule_of_ones_own() -> None:
    drive = Drive(policy("mixed", batching=SmallChunks()), LIMITS)
    drive.run([scripted(0, 5, 2), scripted(1, 6, 1)])
    assert drive.lines == [
        # One new request a step; the first chunk is what the budget allows.
        "0:0+5* | - | 0=0,1,2 | -",
        "1:0+6* | 0 | 1=3,4,5 | -",
    ]


def test_a_rule_sees_running_waiting_and_what_is_left() -> None:
    seen: list[tuple[int, int, int, int, list[int], list[int]]] = []

    class Watching:
        def __deepcopy__(self, memo: object) -> "Watching":
            return self

        def compose(self, step: Step) -> None:
            waiting = [state.id for state in step.waiting()]
            running = [state.id for state in step.running]
            seen.append(
                (step.num_running, step.num_waiting, step.num_tokens, step.num_seats, running, waiting)
            )
            step.decode()
            step.continue_prefills()
            step.admit_in_order()

    drive = Drive(policy("mixed", batching=Watching()), LIMITS)
    drive.run([scripted(i, 3, 2) for i in range(3)])
    assert seen[:3] == [
        (0, 3, 8, 2, [], [0, 1, 2]),
        (2, 1, 8, 0, [0, 1], [2]),
        (0, 1, 8, 2, [], [2]),
    ]


def test_a_smaller_second_try_at_admission_is_not_mistaken_for_the_first() -> None:
    """With first-chunk admission a rule may try fewer tokens when a large chunk finds no blocks."""

    class TryLess:
        def compose(self, step: Step) -> None:
            step.decode()
            step.continue_prefills()
            state = step.next_waiting()
            if state is not None and not step.admit(state, 6):
                step.admit(state, 2)

    chosen = policy("mixed", batching=TryLess(), watermark=0.0, scheduler_reserve_full_isl=False)
    drive = Drive(chosen, Limits(16, 2, max_model_len=32, block_size=2, num_blocks=6))
    drive.add(scripted(0, 8, 2))
    drive.schedule()
    drive.commit()
    drive.add(scripted(1, 8, 2))
    # Two blocks are free: 6 tokens do not fit beside the decode's fifth block, 2 do.
    plan = drive.schedule()
    assert [(c.request, c.num_tokens) for c in plan.chunks] == [(0, 2)] or plan.chunks[-1].num_tokens == 2


def test_a_rule_may_ask_to_be_woken() -> None:
    """Request 0 waits for company until its patience ends; 1 and 2 keep each other company."""
    drive = Drive(policy("mixed", batching=WaitForCompany(num_wanted=2, patience_ns=50)), LIMITS)
    drive.run([scripted(0, 2, 2, arrival_ns=5), *(scripted(i, 2, 2, arrival_ns=100 * i) for i in (2, 3, 4))])
    assert [drive.states[i].first_schedule_ns for i in (0, 2, 3, 4)] == [55, 250, 350, 450]
    both = Drive(policy("mixed", batching=WaitForCompany(num_wanted=2, patience_ns=50)), LIMITS)
    both.run([scripted(0, 2, 2, arrival_ns=5), scripted(1, 2, 2, arrival_ns=25)])
    assert [both.states[i].first_schedule_ns for i in range(2)] == [25, 25]
    plan = Drive(policy("mixed", batching=WaitForCompany()), LIMITS).schedule()
    assert plan.wake_ns is None


def test_contiguous_allocator_of_ones_own() -> None:
    class PowerOfTwo(ContiguousAllocator):
        """Reserves the next power of two of what the request may need."""

        def num_reserved_tokens(self, state: RequestState) -> int:
            return 1 << (state.request.num_prompt_tokens + state.limit - 1).bit_length()

    drive = Drive(policy("mixed", allocator=PowerOfTwo()), LIMITS)
    drive.run(SCRIPTS)
    assert dict(drive.plans[0].new_blocks)[0] == tuple(range(8))
