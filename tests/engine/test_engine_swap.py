"""Preemption by swapping never shows in the output: KV goes to host memory and comes back, anywhere."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_models import (
    KINDS,
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
    tiny_model,
)
from engine_rules import PreemptAt, PreemptAtRandom

from pagedserve.engine.engine import Engine
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.swapping import run_swaps
from pagedserve.kernels.host_cache import HostCache
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Policy, RequestState, Status, StepPlan, policy
from pagedserve.policy.blocks import PagedAllocator

NUM_TOKENS = 12
DEPTHS = (0, 1)
CACHES = (False, True)


def swapping(batching: Any = "mixed", caches: bool = False, **changes: Any) -> Policy:
    return Policy(
        batching=batching, preemption_mode="swap", enable_prefix_caching=caches, watermark=0.0, **changes
    )


def total(record: RunRecord, column: str) -> int:
    return sum(record.array("steps", column).tolist())


def poison(engine: Engine) -> None:
    """Write NaN into every block, here and on the host, that nobody may read any more.

    Those are the free ones without content, but for what copies read that are not done: of steps in flight, and
    planned by a step that was not launched.
    """
    scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(scheduler.allocator, PagedAllocator)
    assert runner.kv.host is not None
    plans = [flight.plan for flight in scheduler.in_flight]
    out = [swap for plan in plans for swap in plan.swapped_out] + list(scheduler.host._out.values())
    read = {block for swap in out for block in swap.blocks}
    host_read = {block for plan in plans for swap in plan.swapped_in for block in swap.host_blocks}
    free = [block for block in scheduler.allocator._free if block not in read]
    host_free = [block for block in scheduler.host._free if block not in host_read]
    runner.kv.data[:, free] = torch.nan
    runner.kv.host.data[host_free] = torch.nan


def check_greedy(kind: str, texts: Sequence[tuple[int, ...]], outputs: Sequence[Sequence[int]]) -> None:
    for text, output in zip(texts, outputs, strict=True):
        assert tuple(output) == hf_greedy(kind, text, NUM_TOKENS), f"prompt {text}"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("rule", RULES)
def test_a_pool_too_small_under_every_rule(rule: str, caches: bool, depth: int) -> None:
    """With NaN in all that is free, device and host, after every step; nothing is computed twice."""
    texts = prompts(24, 32)
    spec = policy(rule, preemption_mode="swap", watermark=0.0, enable_prefix_caching=caches)
    with engine_of(spec, small_limits(num_blocks=26, num_cpu_blocks=40), depth=depth) as engine:
        states = [engine.submit(text, greedy(NUM_TOKENS))[0] for text in texts]
        drain(engine, lambda: poison(engine))
        record = engine.record()
        assert_drained(engine)
    check_greedy("llama", texts, [state.completion().token_ids for state in states])
    assert total(record, "num_recomputed_tokens") == 0
    if rule != "serial":  # where nothing runs beside
        assert total(record, "num_preemptions") > 3
        assert total(record, "num_blocks_swapped_out") >= total(record, "num_blocks_swapped_in") > 10
        assert caches or total(record, "num_blocks_swapped_out") == total(record, "num_blocks_swapped_in")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", CACHES)
def test_forced_at_every_output_position(caches: bool, depth: int, after: bool) -> None:
    """CASES B2 with swapping: the tokens of the run without preemption, each once, none computed again."""
    texts = prompts(4, 6)
    for position in range(NUM_TOKENS):
        spec = swapping(PreemptAt(1, position, after), caches)
        with engine_of(spec, small_limits(num_cpu_blocks=64), depth=depth) as engine:
            heard = Heard()
            states = [engine.submit(text, greedy(NUM_TOKENS), heard)[0] for text in texts]
            drain(engine, lambda: poison(engine))
            assert engine.scheduler.num_preemptions == 1
            record = engine.record()
            assert_drained(engine)
        check_greedy("llama", texts, [heard.tokens(state.sequence.request.id) for state in states])
        assert total(record, "num_recomputed_tokens") == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_between_prefill_chunks(depth: int) -> None:
    """A prompt goes on where it was, which need not be at the edge of a block."""
    texts = [*prompts(3, 6), tuple(range(50)), *prompts(2, 8)]
    for computed in (1, 9, 17, 33):
        rule = PreemptAt(3, 0, num_computed=computed)
        limits = small_limits(max_num_batched_tokens=9, num_cpu_blocks=64)
        with engine_of(swapping(rule), limits, depth=depth) as engine:
            completions = run_all(engine, texts, greedy(NUM_TOKENS))
            record = engine.record()
        check_greedy("llama", texts, [completion.token_ids for completion in completions])
        assert record.plans is not None
        (swap,) = [row for row in record.plans.to_pylist() if row["in_requests"]]
        assert swap["in_requests"] == [3]
        start = dict(zip(swap["chunk_requests"], swap["chunk_starts"], strict=True))[3]
        assert computed <= start < 50
        assert len(swap["in_blocks"]) == -(-start // 4)
        assert total(record, "num_recomputed_tokens") == 0


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_storms_of_preemptions(kind: str, depth: int) -> None:
    """Every request may be swapped in every step; a host pool that is often full, so that some are recomputed."""
    texts = prompts(7, 7)
    swapped = recomputed = 0
    for seed in range(3):
        spec = swapping(PreemptAtRandom(seed, 0.06), seed > 0)
        limits = small_limits(max_num_batched_tokens=23, num_cpu_blocks=(64, 64, 8)[seed])
        with engine_of(spec, limits, model=tiny_model(kind), depth=depth) as engine:
            states = [engine.submit(text, greedy(NUM_TOKENS))[0] for text in texts]
            drain(engine, lambda: poison(engine))
            record = engine.record()
            assert_drained(engine)
        check_greedy(kind, texts, [state.completion().token_ids for state in states])
        swapped += total(record, "num_blocks_swapped_in")
        recomputed += total(record, "num_recomputed_tokens")
    assert swapped > 50
    assert recomputed > 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_sampled_output_is_that_of_an_undisturbed_run(depth: int) -> None:
    """With noise, penalties and log probabilities of the prompt, some of which are told before the swap."""
    texts = prompts(8, 19)
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, frequency_penalty=0.3 * (i % 2)
        )
        if i % 3
        else greedy(NUM_TOKENS, prompt_logprobs=1)
        for i in range(len(texts))
    ]
    with engine_of("mixed", small_limits(num_blocks=200), depth=depth) as engine:
        expected = run_all(engine, texts, params)
    limits = small_limits(max_num_batched_tokens=17, num_cpu_blocks=40)
    with engine_of(swapping(PreemptAtRandom(3, 0.08), True), limits, depth=depth) as engine:
        found = run_all(engine, texts, params)
        assert total(engine.record(), "num_blocks_swapped_in") > 10
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        told = [[e and e.chosen.logprob for e in each.prompt_logprobs or ()] for each in (one, other)]
        assert told[0] == pytest.approx(told[1], abs=1e-4)


def step_until(engine: Engine, reached: Callable[[], bool]) -> None:
    for _ in range(100):
        if reached():
            return
        assert engine.step()
        engine.scheduler.check()
        poison(engine)
    raise AssertionError("the state was never reached")


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_outputs", [1, 5, 11])
def test_abort_while_swapped_out(num_outputs: int, depth: int) -> None:
    """Its host blocks are free at once, whether or not the copy was made; the others never notice."""
    texts = prompts(4, 31, longest=12)
    spec = swapping(PreemptAt(1, num_outputs), caches=False)
    with engine_of(spec, small_limits(num_cpu_blocks=64), depth=depth) as engine:
        states = [engine.submit(text, greedy(NUM_TOKENS))[0] for text in texts]

        def away() -> RequestState | None:
            found = engine.scheduler.states.get(1)
            return found if found is not None and found.status is Status.PREEMPTED else None

        step_until(engine, lambda: away() is not None)
        victim = away()
        assert victim is not None
        assert len(victim.host_blocks) == engine.scheduler.host.num_used_blocks > 0
        engine.abort(1)
        engine.step()
        assert engine.scheduler.host.num_used_blocks == 0
        drain(engine, lambda: poison(engine))
        assert_drained(engine)
    told = states[1].completion().token_ids
    assert told == hf_greedy("llama", texts[1], NUM_TOKENS)[: len(told)]
    others = [0, 2, 3]
    check_greedy("llama", [texts[i] for i in others], [states[i].completion().token_ids for i in others])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", CACHES)
def test_aborts_all_along_with_nan_in_what_is_free(caches: bool, depth: int) -> None:
    """CASES A2 with swapping."""
    rng, texts, swapped = random.Random(depth), prompts(24, 32), 0
    with engine_of(
        swapping(caches=caches), small_limits(num_blocks=26, num_cpu_blocks=16), depth=depth
    ) as engine:
        states, left = [], list(texts)
        while left or engine.has_work:
            if left and rng.random() < 0.5:
                states += engine.submit(left.pop(), greedy(NUM_TOKENS))
            if states and rng.random() < 0.1:
                engine.abort(rng.choice(states).sequence.request.id)
            engine.step()
            engine.scheduler.check()
            poison(engine)
        swapped = total(engine.record(), "num_blocks_swapped_out")
        assert engine.scheduler.host.num_used_blocks == 0
        assert_drained(engine)
    assert swapped > 10
    assert {state.finish_reason for state in states} == {"length", "abort"}
    for state in states:
        completion = state.completion()
        expected = hf_greedy("llama", completion.prompt_token_ids, NUM_TOKENS)
        assert completion.token_ids == expected[: len(completion.token_ids)]
        assert len(completion.token_ids) == NUM_TOKENS or completion.finish_reason == "abort"


class OnlyLong:
    """A mode of one's own: short sequences are computed again, long ones swapped."""

    def swaps(self, victim: RequestState, num_blocks: int, num_free_host_blocks: int) -> bool:
        return num_blocks >= 6


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_mode_of_ones_own_decides_each_time(depth: int) -> None:
    texts = prompts(24, 32)
    spec = Policy(preemption_mode=OnlyLong(), watermark=0.0)
    with engine_of(spec, small_limits(num_blocks=26, num_cpu_blocks=40), depth=depth) as engine:
        completions = run_all(engine, texts, greedy(NUM_TOKENS))
        plans = engine.record().plans
        record = engine.record()
    check_greedy("llama", texts, [completion.token_ids for completion in completions])
    assert plans is not None
    counts = [count for row in plans.to_pylist() for count in row["out_counts"]]
    assert min(counts) >= 6
    assert total(record, "num_recomputed_tokens") > 0


def test_host_memory_is_taken_by_those_who_may_use_it_alone() -> None:
    limits = small_limits(num_cpu_blocks=8)
    with engine_of("mixed", limits) as engine:
        assert engine.runner.kv.host is None
    with engine_of(swapping(), limits) as engine:
        host = engine.runner.kv.host
        assert host is not None
        assert (host.num_blocks, tuple(host.data.shape)) == (8, (8, 2, 2, 2, 4, 8))
        again = Engine(engine.runner.model, engine.vocabulary, swapping(), limits, kv=engine.runner.kv)
        assert again.runner.kv.host is host, "an engine on the same cache uses the same memory"
    with pytest.raises(ValueError, match="preemption_mode is swap and num_cpu_blocks is 0"):
        engine_of(swapping()).__enter__()


def test_out_goes_before_in() -> None:
    """A plan may give the blocks of one who goes to one who comes, on the host as on the device."""
    model = tiny_model()
    kv = model.make_cache(4, 4)
    kv.data[:, :4] = torch.arange(4.0).view(1, 4, 1, 1, 1, 1)
    host = HostCache(kv, 2)
    host.data[1] = 9.0
    run_swaps(kv, host, StepPlan(0, swapped_out=(_swap(2, 0),), swapped_in=(_swap(2, 1),)))
    assert host.data[0].unique().tolist() == [2.0]
    assert kv.data[:, 2].unique().tolist() == [9.0]


def _swap(block: int, host_block: int) -> Any:
    from pagedserve.policy import Swap

    return Swap(0, (block,), (host_block,))
