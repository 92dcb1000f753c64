"""Masks, bias and penalties: exact against a plain twin, the neighbours untouched."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.adjustments import AdjustmentTable
from pagedserve.engine.sampling.penalties import TokenCountsState
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import sample

SIZE = 70  # not a multiple of a mask's words
ids = st.integers(0, SIZE - 1)
penalty = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.25, 2.0])
any_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.25, 2.0]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=4),
    allowed_token_ids=st.one_of(st.none(), st.none(), st.lists(ids, min_size=1, max_size=50)),
)
sequences = st.tuples(st.lists(ids, min_size=1, max_size=30), st.lists(ids, max_size=30))


def twin(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """One row by the book, in float32 as the sampler has it."""
    f = np.float32
    counts, made = Counter(output), [f(value) for value in logits]
    bias: dict[int, float] = dict(params.bias_pairs)
    for token in range(SIZE):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            made[token] = f(-inf)
        made[token] += f(bias.get(token, 0.0))
        if token in counts or token in prompt:
            r = f(params.repetition_penalty)
            made[token] = made[token] / r if made[token] > 0 else made[token] * r
        made[token] -= f(params.frequency_penalty) * f(counts[token])
        made[token] -= f(params.presence_penalty) * f(token in counts)
    return [float(value) for value in made]


def table_of(params: list[SamplingParams], lived: list[tuple[list[int], list[int]]]) -> AdjustmentTable:
    table = AdjustmentTable(SIZE, torch.device("cpu"))
    for request, (one, (prompt, output)) in enumerate(zip(params, lived, strict=True)):
        table.add(request, one, prompt_ids=prompt, first_stoppable=0, suppressed_ids=(), grammar=None)
        for token in output:
            table.append(request, token)
    return table


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(any_params, sequences), min_size=1, max_size=6), st.randoms())
def test_s2_each_row_is_adjusted_as_the_twin_says(cases: Any, rng: Any) -> None:
    """CASES S2, for the logits: in any order of rows, a row depends on its own sequence alone."""
    params, lived = [list(column) for column in zip(*cases, strict=True)]
    table = table_of(params, lived)
    order = list(range(len(cases)))
    rng.shuffle(order)
    logits = torch.randn(len(cases), SIZE, generator=torch.Generator().manual_seed(len(cases)))
    expected = [twin(logits[row].tolist(), params[row], *lived[row]) for row in order]
    given_rows = logits[order].clone()
    adjustments = table.select(order, [len(prompt) + len(output) for prompt, output in lived])
    if adjustments is not None:
        adjustments.apply(given_rows)
    assert given_rows.tolist() == expected


def test_a_repetition_penalty_counts_the_prompt_and_the_others_do_not() -> None:
    """CASES S2: vLLM's and OpenAI's meanings."""
    logits = torch.tensor([[2.0, 2.0, -2.0, -2.0] + [-9.0] * (SIZE - 4)])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)
    table = table_of([params], [([0, 2], [1, 3, 3])])
    adjustments = table.select([0], [5])
    assert adjustments is not None
    adjustments.apply(logits)
    assert logits[0, :4].tolist() == [1.0, 1.0 - 1.25, -4.0, -4.0 - 1.5]


def test_counts_grow_past_their_first_room() -> None:
    state = TokenCountsState(SamplingParams(frequency_penalty=1.0), [5, 5, 5])
    tokens = [*range(300), *range(0, 300, 3)]
    for token in tokens:
        state.append(token)
    assert dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True)) == dict(Counter(tokens))


def test_requests_that_ask_for_nothing_cost_nothing() -> None:
    rows = SamplingRows(SIZE)
    rows.add(0, SamplingParams(), seed=0, prompt_ids=[1, 2])
    rows.add(1, SamplingParams(frequency_penalty=1.0), seed=0, prompt_ids=[1, 2])
    assert rows.select((0,), [2]).adjustments is None
    assert rows.select((1,), [2]).adjustments is not None
    rows.remove(1)
    assert not rows._adjustments._requests


def test_a_bias_can_force_and_forbid() -> None:
    rows = SamplingRows(SIZE)
    rows.add(0, SamplingParams(logit_bias={7: 100}), seed=1, prompt_ids=[0])
    rows.add(1, SamplingParams(logit_bias={i: -100 for i in range(SIZE) if i != 9}), seed=1, prompt_ids=[0])
    rows.add(2, SamplingParams(allowed_token_ids=[3, 68]), seed=1, prompt_ids=[0])
    for position in range(1, 20):
        chosen = sample(torch.zeros(3, SIZE), rows.select((0, 1, 2), [position] * 3)).tokens.tolist()
        assert chosen[:2] == [7, 9]
        assert chosen[2] in (3, 68)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.1}, r"presence_penalty is 2\.1"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\] is 101"),
        ({"logit_bias": {5: float("nan")}}, r"logit_bias\[5\] is nan"),
        ({"logit_bias": {5: True}}, r"logit_bias\[5\] is True"),
        ({"logit_bias": {"five": 1}}, "logit_bias has the key 'five'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has the key"),
        ({"logit_bias": {-1: 1}}, "logit_bias has the id -1"),
        ({"logit_bias": {SIZE: 1}}, "logit_bias has the id 70; the model's ids are 0 to 69"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [True]}, r"allowed_token_ids\[0\] is True"),
        ({"allowed_token_ids": [3, SIZE]}, r"allowed_token_ids\[1\] is 70"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": SIZE + 1}, "prompt_logprobs is 71"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options).validate_for_vocab(SIZE)
