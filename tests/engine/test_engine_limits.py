"""Hard limits: tiny pools, prompts at the edge, long queues, rows without a token to choose. No hang, no leak."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_models import (
    KINDS,
    MAX_MODEL_LEN,
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
    vocabulary,
)

from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import CompletionState
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import RequestRefused, policy
from pagedserve.simulator.workload import recorded_workload

DEPTHS = (0, 1)
ALLOCATORS = ("paged", "contiguous_max", "contiguous_limit")


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_pool_of_one_block(rule: str, depth: int) -> None:
    """One block of 16 tokens serves everybody in turn; outputs end where the block does."""
    limits = small_limits(num_blocks=1, block_size=16)
    texts = prompts(7, 41, longest=16)
    with engine_of(policy(rule, watermark=0.0), limits, depth=depth) as engine:
        completions = run_all(engine, texts, greedy(40))
        for completion in completions:
            # The last token sampled needs no slot.
            room = 16 - len(completion.prompt_token_ids) + 1
            assert completion.token_ids == hf_greedy("llama", completion.prompt_token_ids, room)
            assert completion.finish_reason == "length"
        with pytest.raises(
            RequestRefused, match=r"17 prompt tokens and needs 2 KV blocks; the pool has 1 of 16"
        ):
            engine.submit(range(17), greedy(1))
        assert_drained(engine)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_prompts_at_the_edge_of_the_model(allocator: str, depth: int) -> None:
    """A prompt of max_model_len is refused with the numbers; one token less leaves room for one."""
    text = tuple(range(MAX_MODEL_LEN))
    with engine_of(policy("mixed", allocator=allocator), depth=depth) as engine:
        for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN):
            message = (
                rf"{length} prompt tokens; max_model_len is {MAX_MODEL_LEN}, .* to {MAX_MODEL_LEN - 1} or"
            )
            with pytest.raises(RequestRefused, match=message):
                engine.submit(list(range(96)) * 10 if length > 97 else range(length), greedy(1))
        with pytest.raises(RequestRefused, match="0 prompt tokens; send at least 1"):
            engine.submit("", greedy(1))
        assert not engine.has_work
        for short in (1, 2, 3):
            (completion,) = run_all(engine, [text[:-short]], greedy(50))
            assert completion.token_ids == hf_greedy("llama", text[:-short], short)
            assert completion.finish_reason == "length"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a4_what_never_fits_the_pool_is_refused_and_blocks_nobody(depth: int) -> None:
    """A4: it fits the model, not the pool: refused at once with the numbers, and those behind it run."""
    limits = small_limits(num_blocks=8)
    texts = prompts(4, 42, longest=20)
    with engine_of("vllm_v1", limits, depth=depth) as engine:
        states = [engine.submit(text, greedy(6))[0] for text in texts[:2]]
        with pytest.raises(
            RequestRefused, match=r"33 prompt tokens and needs 9 KV blocks; the pool has 8 of 4"
        ):
            engine.submit(range(33), greedy(6))
        states += [engine.submit(text, greedy(6))[0] for text in texts[2:]]
        drain(engine)
        for state in states:
            completion = state.completion()
            assert completion.token_ids == hf_greedy("llama", completion.prompt_token_ids, 6)
        assert_drained(engine)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("count", [1, 3])
def test_a4_an_output_that_outgrows_the_pool_ends_with_length(count: int, depth: int) -> None:
    """A4: alone or among others like it, it ends when it would need more than the whole pool."""
    limits = small_limits(num_blocks=6)
    texts = [tuple(range(start, start + 9)) for start in range(count)]
    with engine_of("vllm_v1", limits, depth=depth) as engine:
        for text, completion in zip(texts, run_all(engine, texts, greedy(60)), strict=True):
            assert completion.finish_reason == "length"
            assert completion.token_ids == hf_greedy("llama", text, 24 - 9 + 1)


def test_n_samples_are_bounded_like_requests() -> None:
    """Of n = 5 samples, three fit the queue; two end with the refusal, told like any ending."""
    heard = Heard()
    with engine_of("vllm_v1", small_limits(max_num_queued_reqs=3)) as engine:
        states = engine.submit([1, 2, 3], greedy(4, n=5), heard)
        drain(engine)
        reasons = [state.finish_reason for state in states]
        assert reasons == ["length"] * 3 + ["error"] * 2
        assert states[4].completion().error == "3 requests wait and max_num_queued_reqs is 3; retry later"
        assert [heard.reasons(state.sequence.request.id) for state in states] == [
            [reason] for reason in reasons
        ]
        assert (
            engine.record().requests.column("finish_reason").to_pylist() == ["length"] * 3 + ["refused"] * 2
        )
        assert_drained(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_thousand_queued_requests(depth: int) -> None:
    """1,000 requests on eight seats: each gets its tokens and its one ending; nothing is left behind."""
    heard = Heard()
    texts = [(index % 256, index // 256, index * 7 % 256) for index in range(1000)]
    with engine_of("vllm_v1", small_limits(max_num_seqs=8), depth=depth) as engine:
        states = [engine.submit(text, greedy(2), heard)[0] for text in texts]
        while engine.has_work:
            assert engine.step() or not engine.has_work
        assert engine.num_live == 0
        assert all(len(state.token_ids) == 2 for state in states)
        for state in states[::250]:
            completion = state.completion()
            assert completion.token_ids == hf_greedy("llama", completion.prompt_token_ids, 2)
        ended = [delta.request for delta in heard.deltas if delta.finish_reason == "length"]
        assert sorted(ended) == list(range(1000))
        assert_drained(engine)


def random_run(engine: Engine, seed: int) -> list[CompletionState]:
    """Everything at once: bursts, seeds, stops, samples, salts, limits, aborts; also of the aborted."""
    rng = random.Random(seed)
    states: list[CompletionState] = []
    texts = prompts(24, 43 + seed)
    for text in texts:
        while rng.random() < 0.6:
            engine.step()
            engine.scheduler.check()
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            n=rng.choice([1, 1, 1, 3]),
            max_tokens=rng.randint(1, 30),
            stop_token_ids=rng.sample(range(256), 8),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 2]),
        )
        stop_after = rng.choice([None, None, 5])
        states += engine.submit(text, params, stop_after=stop_after, cache_salt=rng.choice([None, "a"]))
        if rng.random() < 0.3:
            engine.abort(rng.choice(states).sequence.request.id)
    drain(engine)
    return states


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rule", RULES)
def test_a5_nothing_is_left_after_any_workload(rule: str, depth: int) -> None:
    """A5: free + cached is total, no reference, seat, row or sequence is left; every request ended once."""
    with engine_of(rule, small_limits(num_blocks=30), depth=depth) as engine:
        states = random_run(engine, depth)
        assert_drained(engine)
        record = engine.record()
    rows = record.requests.to_pylist()
    assert {row["finish_reason"] for row in rows} == {"stop", "length", "abort"}
    for state in states:
        row = rows[state.sequence.request.id]
        assert row["finish_reason"] == state.finish_reason
        assert row["num_output_tokens"] == len(state.token_ids) <= row["max_tokens"]
        wanted = state.sequence.params.logprobs
        assert len(state.logprobs) == (0 if wanted is None else len(state.token_ids))


@pytest.mark.parametrize("kind", KINDS)
def test_limits_beyond_the_model_are_refused_at_the_start(kind: str) -> None:
    """More positions than the model has would fail in the middle of serving."""
    with (
        pytest.raises(ValueError, match="max_model_len is 257; the model has 256 positions"),
        engine_of(limits=replace(small_limits(), max_model_len=257), model=tiny_model(kind)),
    ):
        pass


def test_an_eos_id_that_is_no_token_is_refused_at_the_start() -> None:
    """It would fail in the middle of serving, when ``min_tokens`` suppresses it."""
    vocab = replace(vocabulary(), eos_token_ids=frozenset([3, 999]))
    with pytest.raises(ValueError, match=r"eos_token_ids\[1\] is 999"), engine_of(vocab=vocab):
        pass


def test_ids_that_are_no_integers_are_refused() -> None:
    """1.5 is no token; numpy's integers are."""
    with engine_of() as engine:
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            engine.submit([1, 1.5], greedy(1))  # pyright: ignore
        (completion,) = run_all(engine, [np.array([1, 2])], greedy(3))  # pyright: ignore
        assert completion.prompt_token_ids == (1, 2)
        assert all(type(token) is int for token in completion.prompt_token_ids)


def test_waiting_counts_from_before_the_prompt_is_tokenised() -> None:
    """TTFT includes the time that the tokeniser takes."""
    times: list[int] = []

    def encode(text: str) -> list[int]:
        times.append(engine.loop.clock())
        return [1]

    with engine_of(vocab=replace(vocabulary(), encode=encode)) as engine:
        (state,) = engine.submit("slow", greedy(1))
        assert state.sequence.request.arrival_ns <= times[0]
        drain(engine)


@pytest.mark.parametrize("name", ["stop_after", "predicted_output_tokens"])
def test_numbers_of_tokens_below_one_are_refused(name: str) -> None:
    """A stop after no token would never be reached."""
    with engine_of() as engine:
        submit: Any = engine.submit
        for value in (0, -3):
            with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least 1, or None"):
                submit([1], greedy(1), **{name: value})
        assert not engine.has_work


def test_what_a_policy_may_go_by_reaches_it_the_record_and_the_replay() -> None:
    """Priority, tenant, deadline and predicted length."""
    facts = {
        "priority": 3,
        "tenant": "a",
        "deadline_ns": 1 << 50,
        "predicted_output_tokens": 5,
    }
    with engine_of() as engine:
        (state,) = engine.submit(
            [1, 2], greedy(3), priority=3, tenant="a", deadline_ns=1 << 50, predicted_output_tokens=5
        )
        drain(engine)
        record = engine.record()
    (row,) = record.requests.to_pylist()
    ((replayed, _, _),) = recorded_workload(record).sends
    for name, value in facts.items():
        assert getattr(state.sequence.request, name) == row[name] == getattr(replayed, name) == value
