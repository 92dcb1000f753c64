"""Aborts in every state: nothing more is told, blocks come back within a step, the others never notice."""

import random
from collections.abc import Callable

import pytest
import torch
from engine_models import (
    RULES,
    Heard,
    assert_drained,
    drain,
    engine_of,
    greedy,
    hf_greedy,
    prompts,
    run_all,
    small_limits,
)
from engine_rules import PreemptAt

from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import CompletionState
from pagedserve.policy import Policy, Status
from pagedserve.policy.blocks import PagedAllocator

LENGTH = 12
DEPTHS = (0, 1)
LONG = tuple(range(60, 100))


def status_of(engine: Engine, state: CompletionState) -> Status | None:
    found = engine.scheduler.states.get(state.sequence.request.id)
    return None if found is None else found.status


def step_until(engine: Engine, reached: Callable[[], bool]) -> None:
    for _ in range(100):
        if reached():
            return
        assert engine.step()
        engine.scheduler.check()
    raise AssertionError("the state was never reached")


class Scene:
    """A victim among others, brought into one state and then aborted."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.heard = engine, Heard()
        texts = prompts(3, 31, longest=12)
        self.others = [engine.submit(text, greedy(LENGTH), self.heard)[0] for text in texts]

    def send_victim(self, text: tuple[int, ...] = LONG) -> None:
        (self.victim,) = self.engine.submit(text, greedy(LENGTH), self.heard)
        self.id = self.victim.sequence.request.id

    def abort_and_finish(self) -> None:
        """The abort takes effect in the next step; from then on nothing is heard but that it ended."""
        engine, told = self.engine, len(self.heard.tokens(self.id))
        held = set(engine.scheduler.states[self.id].block_table)
        engine.abort(self.id)
        engine.step()
        engine.scheduler.check()
        assert self.heard.reasons(self.id) == ["abort"]
        assert self.id not in engine.scheduler.states
        owned = {block for state in engine.scheduler.running.values() for block in state.block_table}
        if isinstance(engine.scheduler.allocator, PagedAllocator) and not engine.scheduler.in_flight:
            assert not held & engine.scheduler.allocator._quarantine.keys()
            assert not held & engine.scheduler.allocator._used - owned
        drain(engine)
        completion = self.victim.completion()
        assert len(self.heard.tokens(self.id)) == told == len(completion.token_ids)
        assert completion.token_ids == hf_greedy("llama", completion.prompt_token_ids, LENGTH)[:told]
        for state in self.others:
            other = state.completion()
            assert other.finish_reason == "length"
            assert other.token_ids == hf_greedy("llama", other.prompt_token_ids, LENGTH)
        row = engine.record().requests.to_pylist()[self.id]
        assert (row["num_output_tokens"], row["finish_reason"]) == (told, "abort")
        assert_drained(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a1_abort_while_waiting(depth: int) -> None:
    """A1: behind three requests that fill all seats."""
    with engine_of("vllm_v1", small_limits(max_num_seqs=3), depth=depth) as engine:
        scene = Scene(engine)
        engine.step()
        scene.send_victim()
        engine.step()
        assert status_of(engine, scene.victim) is Status.WAITING
        scene.abort_and_finish()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a1_abort_before_the_engine_has_heard_of_it(depth: int) -> None:
    """A1: handed in and aborted between two steps; it still ends once."""
    with engine_of("vllm_v1", depth=depth) as engine:
        heard = Heard()
        (state,) = engine.submit(LONG, greedy(LENGTH), heard)
        engine.abort(state.sequence.request.id)
        drain(engine)
        assert heard.reasons(state.sequence.request.id) == ["abort"]
        assert heard.tokens(state.sequence.request.id) == []
        assert_drained(engine)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a1_abort_between_prefill_chunks(depth: int, num_steps: int) -> None:
    """A1: with a part of the prompt computed, or in flight."""
    limits = small_limits(max_num_batched_tokens=11, max_num_seqs=4)
    with engine_of("vllm_v1", limits, depth=depth) as engine:
        scene = Scene(engine)
        scene.send_victim()
        step_until(engine, lambda: status_of(engine, scene.victim) is Status.RUNNING)
        for _ in range(num_steps - 1):
            engine.step()
        assert 0 < engine.scheduler.states[scene.id].num_computed_tokens <= len(LONG) + depth
        scene.abort_and_finish()


@pytest.mark.parametrize("num_tokens", [1, 2, 5, LENGTH - 1])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a1_abort_while_decoding(depth: int, num_tokens: int) -> None:
    """A1: after any token, at depth 1 with the next one in flight, which is discarded."""
    with engine_of("vllm_v1", depth=depth) as engine:
        scene = Scene(engine)
        scene.send_victim()
        step_until(engine, lambda: len(scene.victim.token_ids) == num_tokens)
        assert len(engine.scheduler.in_flight) == depth
        scene.abort_and_finish()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_outputs", [2, 6, 11])
def test_a1_abort_while_preempted(num_outputs: int, depth: int) -> None:
    """A1: its blocks are gone already; at depth 1 its last token is still in flight."""
    spec = Policy(batching=PreemptAt(3, num_outputs), enable_prefix_caching=True)
    with engine_of(spec, depth=depth) as engine:
        scene = Scene(engine)
        scene.send_victim()
        step_until(engine, lambda: status_of(engine, scene.victim) is Status.PREEMPTED)
        scene.abort_and_finish()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a1_abort_twice_late_and_of_nobody(depth: int) -> None:
    """A1: an abort of what has ended, or never was, is without effect and leaves nothing behind."""
    with engine_of("vllm_v1", depth=depth) as engine:
        heard = Heard()
        (state,) = engine.submit(LONG, greedy(LENGTH), heard)
        request = state.sequence.request.id
        step_until(engine, lambda: len(state.token_ids) == 3)
        for _ in range(3):
            engine.abort(request)
        engine.abort(12_345)
        drain(engine)
        engine.abort(request)
        engine.abort(12_345, "timeout")
        drain(engine)
        assert heard.reasons(request) == ["abort"]
        assert_drained(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a1_the_reason_is_told(depth: int) -> None:
    """A time-out is an abort with another name, for the caller and in the record."""
    with engine_of("vllm_v1", depth=depth) as engine:
        heard = Heard()
        states = [engine.submit(LONG, greedy(LENGTH), heard)[0] for _ in range(2)]
        engine.step()
        engine.abort(states[1].sequence.request.id, "timeout")
        drain(engine)
        assert [state.finish_reason for state in states] == ["length", "timeout"]
        assert engine.record().requests.column("finish_reason").to_pylist() == ["length", "timeout"]
        assert_drained(engine)


def poison_free_blocks(engine: Engine) -> int:
    """Write NaN into every block that nobody may read: free, without content, touched by no step in flight."""
    allocator = engine.scheduler.allocator
    assert isinstance(allocator, PagedAllocator)
    engine.runner.kv.data[:, allocator._free] = torch.nan
    return len(allocator._free)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", [False, True])
def test_a2_freed_blocks_are_never_read_again(caches: bool, depth: int) -> None:
    """A2: with NaN in all free blocks after every step, and aborts and preemptions all along, outputs are right.

    A step in flight that still read a block given back too early would end its requests with an error.
    """
    rng = random.Random(depth)
    texts = prompts(24, 32)
    spec = Policy(watermark=0.0, enable_prefix_caching=caches)
    num_poisoned = 0
    with engine_of(spec, small_limits(num_blocks=26), depth=depth) as engine:
        states, left = [], list(texts)
        while left or engine.has_work:
            if left and rng.random() < 0.5:
                states += engine.submit(left.pop(), greedy(LENGTH))
            if states and rng.random() < 0.1:
                engine.abort(rng.choice(states).sequence.request.id)
            engine.step()
            engine.scheduler.check()
            num_poisoned += poison_free_blocks(engine)
        assert engine.scheduler.num_preemptions > 3
        assert_drained(engine)
    assert num_poisoned > 100
    reasons = [state.finish_reason for state in states]
    assert set(reasons) == {"length", "abort"}
    for state in states:
        completion = state.completion()
        expected = hf_greedy("llama", completion.prompt_token_ids, LENGTH)
        assert completion.token_ids == expected[: len(completion.token_ids)]
        assert len(completion.token_ids) == LENGTH or completion.finish_reason == "abort"


@pytest.mark.parametrize("rule", RULES)
def test_a3_stops_with_a_step_in_flight_release_once(rule: str) -> None:
    """A3: a stop leaves one row of the step in flight to discard; blocks and seats come back exactly once."""
    texts = prompts(9, 33)
    with engine_of(rule, small_limits(max_num_seqs=4), depth=1) as engine:
        for length in (1, 2, 3, 7):
            states = [engine.submit(text, greedy(LENGTH), stop_after=length)[0] for text in texts]
            drain(engine)
            for state in states:
                completion = state.completion()
                expected = hf_greedy("llama", completion.prompt_token_ids, LENGTH)
                assert completion.token_ids == expected[:length]
        assert engine.scheduler.num_discarded_tokens > 3
        assert_drained(engine)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rule", RULES)
def test_abort_storms(rule: str, depth: int) -> None:
    """Everything is aborted again and again, at random moments; then the engine is as good as new."""
    rng = random.Random(7)
    texts = prompts(40, 34)
    with engine_of(rule, small_limits(num_blocks=30), depth=depth) as engine:
        for _ in range(6):
            states = [engine.submit(text, greedy(LENGTH))[0] for text in texts]
            for _ in range(rng.randrange(8)):
                engine.step()
                engine.scheduler.check()
            for state in states:
                engine.abort(state.sequence.request.id)
            engine.step()
            assert not engine.scheduler.states
            assert {state.finish_reason for state in states} <= {"abort", "length"}
        drain(engine)
        assert_drained(engine)
        for completion in run_all(engine, texts[:4], greedy(LENGTH)):
            assert completion.token_ids == hf_greedy("llama", completion.prompt_token_ids, LENGTH)
