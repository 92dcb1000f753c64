"""50,000 draws from one row against the promised distribution, and wrong samplers that must fail this."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling import draws
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import sample

NUM_DRAWS = 50_000
VOCAB_SIZE = 200  # enough for long tails
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(11)) * 2

COMBINATIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=5),
    SamplingParams(top_k=150),
    SamplingParams(temperature=4.0, top_p=0.95),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9),
    SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=3.0, top_k=20, top_p=0.7, min_p=0.3),
]


def promised(params: SamplingParams) -> np.ndarray:
    """Temperature, then min_p, top_k and top_p, as vLLM documents them; NumPy doubles, ascending sort."""
    logits = LOGITS.double().numpy() / params.temperature
    probs = np.exp(logits - logits.max())
    probs[probs < params.min_p] = 0
    if params.top_k > 0:
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    probs /= probs.sum()
    ascending = np.argsort(probs)
    cut = np.cumsum(probs[ascending]) <= 1 - params.top_p
    cut[-1] = False
    probs[ascending[cut]] = 0
    return probs / probs.sum()


def observed(params: SamplingParams) -> np.ndarray:
    """Counts by token of one request at 50,000 positions, as 50 batches."""
    rows = SamplingRows(VOCAB_SIZE)
    num_rows = 1000
    for request in range(num_rows):
        rows.add(request, params, seed=2024, prompt_ids=())
    tokens = []
    for first in range(0, NUM_DRAWS, num_rows):
        batch = rows.select(tuple(range(num_rows)), range(first, first + num_rows))
        tokens.append(sample(LOGITS.repeat(num_rows, 1), batch).tokens)
    return np.bincount(torch.cat(tokens).numpy(), minlength=VOCAB_SIZE)


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-squared, tokens expected fewer than 5 times pooled; zero when a token that cannot come came."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs * NUM_DRAWS
    rare = expected < 5
    pooled = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    keep = pooled[1] > 0
    if keep.sum() == 1:
        return 1.0
    return float(chisquare(pooled[0][keep], pooled[1][keep]).pvalue)


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_draws_follow_the_promised_distribution(params):
    assert p_value(observed(params), promised(params)) > 1e-3


def without_temperature(logits, peak, temperature, weights=draws.fixed_point_weights):
    return weights(logits, peak, torch.ones_like(temperature))


def a_little_too_warm(logits, peak, temperature, weights=draws.fixed_point_weights):
    return weights(logits, peak, temperature * 1.05)


def without_the_crossing_token(weights, floor, quota, cut=draws.cut):
    return cut(weights, floor, quota - 1)


def with_the_high_bit_lost(weights, words, draw=draws.draw):
    return draw(weights, words >> 1)


def with_one_id_off(weights, words, draw=draws.draw):
    return (draw(weights, words) + 1).clamp_(max=weights.shape[-1] - 1)


def of_the_untempered_mass(top_p, mass, share=draws.share):
    """A nucleus that holds top_p of what the vocabulary weighs without a temperature."""
    plain = draws.fixed_point_weights(LOGITS[None], LOGITS.amax(-1, keepdim=True), torch.ones(1)).sum()
    return share(top_p, torch.minimum(mass, plain.expand_as(mass)))


@pytest.mark.parametrize(
    ("part", "fault", "params"),
    [
        ("fixed_point_weights", without_temperature, SamplingParams(temperature=0.6)),
        ("fixed_point_weights", a_little_too_warm, SamplingParams()),
        ("cut", without_the_crossing_token, SamplingParams(top_p=0.8)),
        ("share", of_the_untempered_mass, SamplingParams(temperature=2.0, top_p=0.8)),
        ("draw", with_the_high_bit_lost, SamplingParams()),
        ("draw", with_one_id_off, SamplingParams()),
    ],
)
def test_a_wrong_sampler_is_found_out(monkeypatch, part, fault, params):
    monkeypatch.setattr(draws, part, fault)
    assert p_value(observed(params), promised(params)) < 1e-6
