"""The table of running requests: joining, leaving, growing, and refusing what the model has no id for."""

import pytest
import torch

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.rows import INITIAL_CAPACITY, SamplingRows
from pagedserve.engine.sampling.sampler import sample


def varied(request: int) -> SamplingParams:
    return SamplingParams(
        temperature=(0.0, 0.5, 1.0)[request % 3],
        top_k=(0, 5)[request % 2],
        top_p=(1.0, 0.8)[request % 5 == 0],
        logprobs=(None, 1)[request % 7 == 0],
    )


def fresh(requests: tuple[int, ...]) -> SamplingRows:
    rows = SamplingRows(50)
    for request in requests:
        rows.add(request, varied(request), seed=request, prompt_ids=())
    return rows


def test_a_table_that_lived_equals_a_fresh_one():
    """Twice the capacity joins, half leaves, slots are used again: batches stay what a new table gives."""
    rows = fresh(tuple(range(2 * INITIAL_CAPACITY)))
    for request in range(0, 2 * INITIAL_CAPACITY, 2):
        rows.remove(request)
    late = tuple(range(500, 530))
    for request in late:
        rows.add(request, varied(request), seed=request, prompt_ids=())
    requests = (*late[::-1], *range(1, 2 * INITIAL_CAPACITY, 4))
    logits = torch.randn(len(requests), 50, generator=torch.Generator().manual_seed(0))
    positions = list(range(len(requests)))
    lived = sample(logits.clone(), rows.select(requests, positions))
    new = sample(logits.clone(), fresh(requests).select(requests, positions))
    assert lived.tokens.tolist() == new.tokens.tolist()
    assert lived.logprobs() == new.logprobs()
    assert len(rows) == INITIAL_CAPACITY + len(late)


def test_the_same_requests_share_their_layout_until_one_joins_or_leaves():
    rows = fresh((0, 1, 2))
    first = rows.select((1, 2), [5, 5])
    second = rows.select((1, 2), [6, 6])
    assert second.layout is first.layout
    assert second.words.tolist() != first.words.tolist()
    rows.remove(0)
    assert rows.select((1, 2), [6, 6]).layout is not first.layout


def test_a_request_id_used_again_takes_the_new_parameters():
    rows = fresh((1,))
    before = rows.select((1,), [5])
    rows.remove(1)
    rows.add(1, SamplingParams(temperature=0.0), seed=1, prompt_ids=())
    assert len(before.words) == 1
    assert len(rows.select((1,), [5]).words) == 0


def test_ids_outside_the_vocabulary_never_enter():
    rows = SamplingRows(50)
    with pytest.raises(ValueError, match=r"stop_token_ids\[0\] is 50"):
        rows.add(0, SamplingParams(stop_token_ids=[50]), seed=0, prompt_ids=[0] * 1)
    with pytest.raises(ValueError, match=r"suppressed_ids\[1\] is 99"):
        rows.add(0, SamplingParams(min_tokens=1), seed=0, prompt_ids=[0] * 1, suppressed_ids=(3, 99))
    assert len(rows) == 0


def test_adding_twice_and_removing_a_stranger_are_bugs():
    rows = fresh((1,))
    with pytest.raises(AssertionError, match="request 1 is in the sampling rows already"):
        rows.add(1, SamplingParams(), seed=0, prompt_ids=())
    with pytest.raises(KeyError):
        rows.remove(2)
