"""Everything at once, at random: each request's output equals the one it has alone in an engine of its own."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from engine_models import (
    KINDS,
    RULES,
    Heard,
    assert_drained,
    drain,
    engine_of,
    prompts,
    small_limits,
    tiny_model,
)
from engine_rules import ChunksOf, PreemptAtRandom
from test_engine_aborts import poison_free_blocks

from pagedserve.engine.outputs import Completion, CompletionState
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import Policy, policy
from pagedserve.policy.blocks import PagedAllocator
from pagedserve.validation.decisions import check_decisions


@dataclass(frozen=True, slots=True)
class Ask:
    """What one caller sends; ``patience``: it gives up after so many tokens."""

    text: tuple[int, ...]
    params: SamplingParams
    stop_after: int | None
    salt: str | None
    patience: int | None


def random_ask(rng: random.Random, said: list[tuple[int, ...]]) -> Ask:
    """A new text, or a turn that goes on from one that was answered."""
    text = (*rng.choice(said)[:60], 1, 2) if said and rng.random() < 0.3 else rng.choice(prompts(30, 71))
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 30]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.02]),
        seed=rng.randrange(1000),
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.choice([1, 2, 9, 25]),
        stop=rng.sample("abcdefghijklmnopqrstuvwxyz", rng.choice([0, 5])),
        stop_token_ids=tuple(rng.sample(range(256), rng.choice([0, 6]))),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, 0, 2]),
    )
    params = replace(params, min_tokens=min(params.max_tokens, rng.choice([0, 0, 4])))
    patience = rng.choice([None, None, None, 0, 1, 5])
    return Ask(text, params, rng.choice([None, None, None, 4]), rng.choice([None, "a"]), patience)


@cache
def alone(kind: str, ask: Ask) -> tuple[Completion, ...]:
    """In an engine of its own: one at a time, the whole prompt at once, nothing cached, nothing overlapped."""
    with engine_of("serial", small_limits(max_num_batched_tokens=96), model=tiny_model(kind)) as engine:
        states = engine.submit(ask.text, ask.params, stop_after=ask.stop_after)
        drain(engine)
        return tuple(state.completion() for state in states)


def random_spec(rng: random.Random) -> Policy:
    batching: Any = rng.choice([*RULES[:4], "mixed", "mixed", ChunksOf(rng.choice([1, 3, 9]))])
    if rng.random() < 0.25:
        batching = PreemptAtRandom(rng.randrange(99), rng.choice([0.02, 0.1]))
    allocator = rng.choice(["paged", "paged", "paged", "contiguous_limit"])
    caches = allocator == "paged" and rng.random() < 0.7
    if not caches and allocator == "contiguous_limit":
        return policy("mixed", batching=batching, allocator=allocator)
    return Policy(
        batching=batching,
        allocator=allocator,
        watermark=rng.choice([0.0, 0.1]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        enable_prefix_caching=caches,
    )


def compare(state: CompletionState, expected: Completion, heard: Heard) -> None:
    """Equal to the output alone, or, if its caller gave up, the beginning of it."""
    completion = state.completion()
    count = len(completion.token_ids)
    assert heard.tokens(completion.request) == list(completion.token_ids)
    assert heard.text(completion.request) == completion.text
    assert heard.reasons(completion.request) == [completion.finish_reason]
    assert completion.token_ids == expected.token_ids[:count]
    if completion.finish_reason != "abort":
        assert (completion.text, completion.finish_reason) == (expected.text, expected.finish_reason)
        assert (completion.stop, count) == (expected.stop, len(expected.token_ids))
    assert (completion.logprobs is None) == (expected.logprobs is None)
    for one, other in zip(completion.logprobs or (), expected.logprobs or (), strict=False):
        assert one.chosen.token_id == other.chosen.token_id
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


def run_at_random(seed: int) -> None:
    """One engine, one workload."""
    rng = random.Random(seed)
    kind, depth, spec = rng.choice(KINDS), rng.choice([0, 1]), random_spec(rng)
    limits = small_limits(
        max_num_batched_tokens=rng.choice([8, 17, 64]),
        max_num_seqs=rng.choice([1, 3, 8]),
        num_blocks=rng.choice([25, 32, 64]),
    )
    heard, sent, said = Heard(), [], []
    with engine_of(spec, limits, model=tiny_model(kind), depth=depth) as engine:

        def after_step() -> None:
            engine.scheduler.check()
            if isinstance(engine.scheduler.allocator, PagedAllocator):
                poison_free_blocks(engine)
            for ask, states in sent:
                for state in states:
                    is_tired = ask.patience is not None and len(state.token_ids) >= ask.patience
                    if is_tired and state.finish_reason is None and state not in tired:
                        tired.append(state)
                        engine.abort(state.sequence.request.id)

        tired: list[CompletionState] = []
        for _ in range(18):
            ask = random_ask(rng, said)
            sent.append(
                (
                    ask,
                    engine.submit(
                        ask.text, ask.params, heard, stop_after=ask.stop_after, cache_salt=ask.salt
                    ),
                )
            )
            while rng.random() < 0.7:
                engine.step()
                after_step()
            for _, states in sent:
                ended = [state for state in states if state.finish_reason in ("stop", "length")]
                said += [(*state.completion().prompt_token_ids, *state.token_ids) for state in ended]
        drain(engine, after_step)
        assert_drained(engine)
        for ask, states in sent:
            for state, expected in zip(states, alone(kind, ask), strict=True):
                compare(state, expected, heard)
        if not isinstance(spec.batching, PreemptAtRandom):
            assert check_decisions(engine.record(), spec).first_difference is None


@pytest.mark.parametrize("seed", range(6))
def test_random_workloads(seed: int) -> None:
    """A few in every run."""
    run_at_random(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_random_workloads(seed: int) -> None:
    """And many before an issue is resolved."""
    run_at_random(seed)
