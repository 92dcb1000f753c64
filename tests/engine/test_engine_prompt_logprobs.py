"""Logprobs of a prompt's own tokens: as transformers has them, whatever the schedule and the cache."""

from __future__ import annotations

import pytest
import torch
from engine_models import (
    assert_drained,
    drain,
    engine_of,
    greedy,
    hf_model,
    prompts,
    run_all,
    small_limits,
    tiny_model,
)
from engine_rules import ChunksOf, PreemptAtRandom

from pagedserve.engine import prompt_logprobs as module
from pagedserve.engine.outputs import Completion
from pagedserve.policy import Policy, policy

TEXTS = prompts(8, 31)


def check(completion: Completion, num_top: int) -> None:
    """Every position against transformers' log softmax."""
    told, text = completion.prompt_logprobs, completion.prompt_token_ids
    assert told is not None
    assert len(told) == len(text)
    assert told[0] is None
    with torch.no_grad():
        logits = hf_model("llama")(torch.tensor([text])).logits[0].double().log_softmax(-1)
    for position, entry in enumerate(told[1:], start=1):
        assert entry is not None
        row = logits[position - 1]
        assert entry.chosen.token_id == text[position]
        assert entry.chosen.logprob == pytest.approx(float(row[text[position]]), abs=1e-4)
        assert len(entry.top) == num_top
        for token in entry.top:
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [token.rank for token in entry.top] == list(range(1, num_top + 1))
        assert (entry.chosen.rank <= num_top) == (entry.chosen in entry.top)


@pytest.mark.parametrize(
    ("spec", "depth"),
    [
        pytest.param(policy("serial"), 0, id="serial"),
        pytest.param(policy("vllm_v1"), 1, id="vllm_v1, overlapped"),
        pytest.param(Policy(batching=ChunksOf(3)), 0, id="chunks of 3"),
        pytest.param(Policy(batching=PreemptAtRandom(4, 0.2)), 0, id="preempted"),
        pytest.param(
            Policy(batching=PreemptAtRandom(5, 0.2), enable_prefix_caching=True), 1, id="and overlapped"
        ),
    ],
)
def test_they_are_the_models_own(spec: Policy, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, preempted within a prompt, beside requests that do not ask; logits a few rows at a time."""
    monkeypatch.setattr(module, "GROUP_ROWS", 7)
    params = [greedy(4, prompt_logprobs=3 if i % 2 == 0 else None) for i in range(8)]
    with engine_of(spec, small_limits(num_blocks=40), depth=depth) as engine:
        made = run_all(engine, TEXTS, params)
        plain = run_all(engine, TEXTS, greedy(4))
    for index, completion in enumerate(made):
        if index % 2 == 0:
            check(completion, 3)
        else:
            assert completion.prompt_logprobs is None
    assert [completion.token_ids for completion in made] == [completion.token_ids for completion in plain]


def test_b10_a_cached_prefix_does_not_hide_them() -> None:
    """CASES B10: the same prompt again, and a longer one, with its blocks in the cache."""
    text = TEXTS[0][:1] * 3 + tuple(range(60, 90))
    with engine_of("vllm_v1", small_limits()) as engine:
        run_all(engine, [text], greedy(2))
        (cached,) = run_all(engine, [text], greedy(2))
        assert cached.num_cached_tokens == 32, "the cache has it"
        (told,) = run_all(engine, [text], greedy(2, prompt_logprobs=2))
        (longer,) = run_all(engine, [(*text, 5, 6, 7)], greedy(2, prompt_logprobs=0))
    check(told, 2)
    check(longer, 0)
    assert told.num_cached_tokens == longer.num_cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(length: int) -> None:
    with engine_of() as engine:
        (made,) = run_all(engine, [TEXTS[0][:length]], greedy(2, prompt_logprobs=1))
    check(made, 1)


def test_each_sample_has_them_and_an_aborted_one_need_not() -> None:
    with engine_of("vllm_v1", small_limits(max_num_batched_tokens=8)) as engine:
        text = tuple(range(40))
        states = engine.submit(text, greedy(2, n=2, temperature=1.0, seed=1, prompt_logprobs=1))
        (gone,) = engine.submit(text, greedy(2, prompt_logprobs=1))
        engine.step()
        engine.abort(gone.sequence.request.id)
        drain(engine)
        assert_drained(engine)
    for state in states:
        check(state.completion(), 1)
    assert gone.completion().prompt_logprobs is None


def test_padded_rows_of_the_vocabulary_never_show() -> None:
    """S3: a model with more rows than the tokenizer has tokens."""
    with engine_of(model=tiny_model("llama", "cpu", 320)) as engine:
        (made,) = run_all(engine, [TEXTS[0]], greedy(2, prompt_logprobs=258))
    assert made.prompt_logprobs is not None
    for entry in made.prompt_logprobs[1:]:
        assert entry is not None
        assert max(token.token_id for token in entry.top) < 258
