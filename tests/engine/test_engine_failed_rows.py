"""Rows from which no token can be chosen: one request ends with an error, and nothing is counted for it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from engine_models import Heard, assert_drained, drain, engine_of, greedy, hf_greedy, prompts, small_limits

from pagedserve.engine import runner
from pagedserve.engine.sampling.rows import SamplingBatch
from pagedserve.engine.sampling.sampler import SampledTokens, sample
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.tokens import token_times
from pagedserve.policy import Policy, policy
from pagedserve.validation.decisions import check_decisions

DEPTHS = (0, 1)
NAN = float("nan")


@contextmanager
def broken_logits(broken: dict[int, int], value: float = NAN) -> Iterator[None]:
    """Make the logits of these requests unusable at that one of their output tokens, from 0."""

    def sample_broken(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        for row, request in enumerate(batch.layout.requests):
            if broken.get(request) == counts.setdefault(request, 0):
                logits[row, 5] = value
            counts[request] += 1
        return sample(logits, batch)

    counts: dict[int, int] = {}
    with mock.patch.object(runner, "sample", sample_broken):
        yield


def assert_counted_as_told(record: RunRecord, told: list[int]) -> None:
    """Request i has ``told[i]`` output tokens in its row and among the emissions."""
    assert record.requests.column("num_output_tokens").to_pylist() == told
    assert token_times(record).counts.tolist() == told


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 8])
@pytest.mark.parametrize(
    ("value", "words"), [(NAN, "contain NaN"), (float("inf"), r"contain \+inf")], ids=["nan", "inf"]
)
def test_a_row_without_a_token_ends_only_its_request(
    value: float, words: str, num_tokens: int, depth: int
) -> None:
    """It says why, and has the tokens before; its neighbours get all of theirs."""
    heard = Heard()
    texts = prompts(5, 44)
    with engine_of("vllm_v1", depth=depth) as engine, broken_logits({2: num_tokens}, value):
        states = [engine.submit(text, greedy(9), heard)[0] for text in texts]
        drain(engine)
        record = engine.record()
        assert_drained(engine)
    for state in states:
        completion = state.completion()
        bad = completion.request == 2
        expected = hf_greedy("llama", completion.prompt_token_ids, 9)
        assert completion.token_ids == expected[: num_tokens if bad else 9]
        assert completion.finish_reason == ("error" if bad else "length")
        assert heard.reasons(completion.request) == [completion.finish_reason]
        assert (completion.error is not None) == bad
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(states[2].completion().error)
    assert record.requests.column("finish_reason").to_pylist() == ["length"] * 2 + ["error"] + ["length"] * 2
    assert_counted_as_told(record, [9, 9, num_tokens, 9, 9])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7])
def test_the_replay_ends_the_request_there_too(num_tokens: int, caches: bool, depth: int) -> None:
    """At its first token, in the middle, at the edge of a block, at its last."""
    spec = policy("vllm_v1", enable_prefix_caching=caches)
    with engine_of(spec, depth=depth) as engine, broken_logits({1: num_tokens}):
        for text in prompts(4, 52):
            engine.submit(text, greedy(8))
        while engine.has_work:
            engine.step()
        live = engine.record()
    assert live.requests.column("finish_reason").to_pylist() == ["length", "error", "length", "length"]
    assert check_decisions(live, spec, check=True).first_difference is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rule", ["prefill_first", "mixed", "static"])
def test_errors_at_random_under_pressure(rule: str, depth: int) -> None:
    """With preemptions, so that rows fail behind a recomputed chunk too; some fail at their last token."""
    rng = random.Random(depth)
    spec: Policy = policy(rule, watermark=0.0)
    texts = prompts(24, 53)
    broken = {request: rng.randrange(12) for request in rng.sample(range(24), 12)}
    limits = small_limits(num_blocks=26, max_num_batched_tokens=24)
    with engine_of(spec, limits, depth=depth) as engine, broken_logits(broken):
        states = []
        for text in texts:
            states += engine.submit(text, greedy(12))
            while rng.random() < 0.5:
                engine.step()
                engine.scheduler.check()
        drain(engine)
        live = engine.record()
        assert_drained(engine)
    assert {state.sequence.request.id for state in states if state.finish_reason == "error"} == set(broken)
    for state in states:
        expected = hf_greedy("llama", texts[state.sequence.request.id], 12)
        assert tuple(state.token_ids) == expected[: broken.get(state.sequence.request.id, 12)]
    assert_counted_as_told(live, [len(state.token_ids) for state in states])
    assert engine.scheduler.num_preemptions > 2 or rule == "static"
    assert check_decisions(live, spec, check=True).first_difference is None
