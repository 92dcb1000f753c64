"""Logprobs are the model's own and ranked exactly, whatever was sampled and whoever shared the batch."""

import pytest
import torch

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.logprobs import gather_logprobs
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import sample

LOGITS = torch.randn(4, 3000, generator=torch.Generator().manual_seed(5)) * 4


def test_values_and_ranks_match_log_softmax():
    token_ids = torch.tensor([0, 17, 2999, 1234])
    exact = LOGITS.double().log_softmax(-1)
    for row, found in enumerate(gather_logprobs(LOGITS, token_ids, 6).positions([6, 6, 6, 6])):
        token = int(token_ids[row])
        assert found.chosen.token_id == token
        assert found.chosen.logprob == pytest.approx(float(exact[row, token]), abs=1e-6)
        assert found.chosen.rank == 1 + int((exact[row] > exact[row, token]).sum())
        top = exact[row].topk(6)
        assert [t.token_id for t in found.top] == top.indices.tolist()
        assert [t.logprob for t in found.top] == pytest.approx(top.values.tolist(), abs=1e-6)
        assert [t.rank for t in found.top] == [1, 2, 3, 4, 5, 6]


def test_equal_logits_rank_by_lowest_id():
    found = gather_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), torch.tensor([4]), 4).positions([4])[0]
    assert found.chosen.rank == 3
    assert [t.token_id for t in found.top] == [1, 2, 4, 0]
    zeros = gather_logprobs(torch.tensor([[-0.0, -1.0, 0.0, -0.0]]), torch.tensor([2]), 3).positions([3])[0]
    assert zeros.chosen.rank == 2
    assert [t.token_id for t in zeros.top] == [0, 2, 3]


def test_a_sampled_token_reports_the_raw_distribution():
    """Temperature, filters and suppression leave no trace in the logprobs (vLLM's raw_logprobs)."""
    rows = SamplingRows(3000)
    best = int(LOGITS[1].argmax())
    params = SamplingParams(temperature=0.3, top_k=3, top_p=0.9, min_p=0.1, min_tokens=1, logprobs=2)
    rows.add(7, SamplingParams(), seed=0, prompt_ids=[0] * 3)
    rows.add(8, params, seed=3, prompt_ids=[0] * 3, suppressed_ids=(best,))
    result = sample(LOGITS[:2].clone(), rows.select((7, 8), [3, 3]))
    assert list(result.logprobs()) == [8]
    reported = result.logprobs()[8]
    exact = LOGITS[1].double().log_softmax(-1)
    assert reported.chosen.token_id == int(result.tokens[1]) != best
    assert reported.chosen.logprob == pytest.approx(float(exact[reported.chosen.token_id]), abs=1e-6)
    assert (reported.top[0].token_id, reported.top[0].rank) == (best, 1)


def test_each_request_gets_as_many_as_it_asked_for():
    rows = SamplingRows(3000)
    for request, wanted in enumerate((0, 5, None, 2)):
        rows.add(request, SamplingParams(temperature=0.0, logprobs=wanted), seed=0, prompt_ids=[0] * 1)
    found = sample(LOGITS.clone(), rows.select((0, 1, 2, 3), [1] * 4)).logprobs()
    assert {request: len(position.top) for request, position in found.items()} == {0: 0, 1: 5, 3: 2}
    assert all(position.chosen.rank == 1 for position in found.values())


def test_a_logprob_is_bit_for_bit_the_same_in_any_batch():
    token_ids = torch.tensor([5, 6, 7, 8])
    together = gather_logprobs(LOGITS, token_ids, 3).positions([3] * 4)
    for row in range(4):
        part = slice(row, row + 1)
        assert gather_logprobs(LOGITS[part], token_ids[part], 3).positions([3]) == [together[row]]


def test_the_whole_vocabulary_sums_to_one():
    found = gather_logprobs(LOGITS[:1], torch.tensor([0]), 3000).positions([3000])[0]
    total = torch.tensor([t.logprob for t in found.top], dtype=torch.float64).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-6)
