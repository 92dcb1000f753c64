"""The choice of tokens: exact against a plain twin, independent of the batch, never a forbidden id."""

from dataclasses import replace
from math import ceil, inf, nan
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling import draws, groups
from pagedserve.engine.sampling.fixed_point import fixed_point_weights, scaled_target
from pagedserve.engine.sampling.logprobs import top_tokens
from pagedserve.engine.sampling.philox import noise_words
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import SamplingError, sample
from pagedserve.engine.stops import TokenStops

# Coarse values, so that rows are full of ties, with -inf for tokens that a model or a mask rules out.
tied_logits = st.sampled_from([-inf, -9.0, -1.0, 0.0, 0.5, 0.5, 2.0, 3.0])
fine_logits = st.floats(-30, 30, width=32)


def random_logits(seed: int, vocab_size: int, spread: float, rounded: bool) -> list[float]:
    """Normal logits; rounded to bfloat16 they are full of ties, as those of a model in that dtype."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits.bfloat16().float() if rounded else logits).tolist()


# From a few leading tokens to nearly all, on either side of draws.MAX_NARROW.
long_rows = st.builds(
    random_logits,
    st.integers(0, 10_000),
    st.sampled_from([100, 200, 600]),
    st.sampled_from([0.01, 0.5, 3.0, 10.0]),
    st.booleans(),
)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([-1, 0, 0, 1, 2, 3, 7, 100, 127, 128, 150, 1000]),
    top_p=st.sampled_from([1e-300, 1e-6, 0.3, 0.5, 0.9, 0.999999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


def rows_of(params: list[SamplingParams], vocab_size: int) -> SamplingRows:
    """Requests 0, 1, ... with prompts of 10, 11, ... tokens."""
    rows = SamplingRows(vocab_size)
    for request, one in enumerate(params):
        rows.add(request, one, seed=one.seed or 0, prompt_ids=[0] * (10 + request))
    return rows


def twin(logits: list[float], params: SamplingParams, position: int) -> int:
    """One row by the book, in Python integers; only exp comes from the sampler's own weights."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.is_greedy:
        return order[0]
    row = torch.tensor([logits])
    weights = fixed_point_weights(row, row.amax(-1), torch.tensor([params.temperature]))[0].tolist()
    weights = [w if w >= ceil(params.min_p * 2**40) else 0 for w in weights]
    order = order[: params.top_k] if params.top_k > 0 else order
    mass, taken, kept = sum(weights[i] for i in order), 0, set()
    for token in order:
        if params.top_p < 1 and taken >= ceil(params.top_p * mass):
            break
        kept.add(token)
        taken += weights[token]
    assert params.seed is not None
    target = taken * noise_words(params.seed, position, 0) // 2**32
    for token, weight in enumerate(weights):
        target -= weight if token in kept else 0
        if target < 0:
            return token
    raise AssertionError("the target lies below the total")


def alone(logits: torch.Tensor, params: list[SamplingParams], position: int) -> list[int]:
    """Each row in a batch of its own."""
    tokens = []
    for request in range(len(params)):
        rows = rows_of(params, logits.shape[1])
        batch = rows.select((request,), [position + request])
        tokens.append(int(sample(logits[request : request + 1].clone(), batch).tokens))
    return tokens


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.lists(st.one_of(tied_logits, fine_logits), min_size=2, max_size=40), long_rows),
    any_params,
    st.integers(0, 2**33),
)
def test_a_row_is_sampled_as_by_the_book(logits, params, position):
    logits = [*logits, 1.0]
    batch = rows_of([params], len(logits)).select((0,), [position])
    expected = twin(logits, params, position)
    assert int(sample(torch.tensor([logits]), batch).tokens) == expected
    with patch.object(draws, "NARROWING_DEVICES", set()):  # as on a device that must not be waited for
        assert int(sample(torch.tensor([logits]), batch).tokens) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_neighbour_order_or_grouping_changes_a_row(data):
    """CASES S1: alone, in any batch and in any order the same row gives the same token and logprobs."""
    params = data.draw(st.lists(any_params, min_size=2, max_size=7))
    vocab_size = data.draw(st.sampled_from([9, 100, 333]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(params), vocab_size, generator=generator) * data.draw(
        st.sampled_from([0.1, 3.0])
    )
    if data.draw(st.booleans()):
        logits = logits.bfloat16().float()
    expected = alone(logits, params, position=50)
    chosen = data.draw(st.lists(st.sampled_from(range(len(params))), unique=True, min_size=1))
    batch = rows_of(params, vocab_size).select(tuple(chosen), [50 + request for request in chosen])
    with patch.dict(groups.MAX_SCRATCH, cpu=data.draw(st.sampled_from([1, 1 << 16, 1 << 18, 1 << 24]))):
        result = sample(logits[chosen], batch)
    assert result.tokens.tolist() == [expected[request] for request in chosen]


@pytest.mark.parametrize("vocab_size", [49_152, 50_257])
def test_a_real_vocabulary_on_one_thread_or_two(vocab_size):
    """Rows off the vector width, narrow and wide nuclei, and threads that split the batch."""
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7, top_p=0.95),
        SamplingParams(seed=3, top_k=2_000),
        SamplingParams(seed=4, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(seed=5, temperature=3.0, top_p=0.99, logprobs=5),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(7)) * 3
    expected = alone(logits, params, position=99)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            batch = rows_of(params, vocab_size).select(tuple(range(6)), [99 + i for i in range(6)])
            assert sample(logits.clone(), batch).tokens.tolist() == expected
    finally:
        torch.set_num_threads(num_threads)
    assert expected == [twin(logits[i].tolist(), params[i], 99 + i) for i in range(6)]


@settings(deadline=None)
@given(st.integers(0, 2**62 - 1), st.integers(0, 2**32 - 1))
def test_scaled_target_is_exact(total, word):
    assert int(scaled_target(torch.tensor(total), torch.tensor(word))) == total * word // 2**32


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
def test_the_ends_of_the_uniform_never_reach_a_masked_token(word):
    logits = torch.full((1, 1000), -inf)
    logits[0, [3, 500, 997]] = torch.tensor([0.0, -60.0, 1.0])
    for params in (SamplingParams(), SamplingParams(top_k=900, top_p=0.999), SamplingParams(min_p=1e-9)):
        batch = replace(rows_of([params], 1000).select((0,), [10]), words=torch.tensor([word]))
        assert int(sample(logits.clone(), batch).tokens) == (3 if word < 2**30 else 997)


@settings(deadline=None)
@given(st.lists(tied_logits, min_size=1, max_size=50), st.integers(-(2**63), 2**63 - 1))
def test_temperature_zero_and_top_k_one_agree_on_the_lowest_id(logits, seed):
    logits = [*logits, 0.0]
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.7, top_k=1, seed=seed)]
    batch = rows_of(params, len(logits)).select((0, 1), [10, 11])
    assert sample(torch.tensor([logits, logits]), batch).tokens.tolist() == [logits.index(max(logits))] * 2


def test_equal_logits_are_cut_at_exactly_k_and_p_by_lowest_id():
    seen = {"top_k": set(), "top_p": set()}
    for position in range(400):
        rows = rows_of([SamplingParams(top_k=100, seed=1), SamplingParams(top_p=0.02, seed=2)], 5000)
        tokens = sample(torch.zeros(2, 5000), rows.select((0, 1), [position, position])).tokens.tolist()
        seen["top_k"].add(tokens[0])
        seen["top_p"].add(tokens[1])
    assert max(seen["top_k"]) == 99
    assert max(seen["top_p"]) == 99
    assert min(len(ids) for ids in seen.values()) > 90


def test_top_p_keeps_the_token_that_crosses_the_line():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    tokens = {
        p: {
            int(sample(logits.clone(), rows_of([SamplingParams(top_p=p)], 3).select((0,), [i])).tokens)
            for i in range(100)
        }
        for p in (0.4, 0.6, 0.9)
    }
    assert tokens == {0.4: {0}, 0.6: {0, 1}, 0.9: {0, 1, 2}}


@pytest.mark.parametrize("padding", [100.0, inf, nan])
def test_padded_columns_are_never_chosen(padding):
    """CASES S3: whatever the padded rows of the output head compute."""
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_p=0.9, logprobs=2)]
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    batch = rows_of(params, 20).select((0, 1, 2), [10, 11, 12])
    expected = sample(logits.clone(), batch)
    padded = torch.cat([logits, torch.full((3, 5), padding)], dim=1)
    result = sample(padded, batch)
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert result.errors() == {}
    assert result.logprobs() == expected.logprobs()


@pytest.mark.parametrize(
    ("fault", "words"), [(nan, "contain NaN"), (inf, r"contain \+inf"), (-inf, "no token is left")]
)
def test_a_broken_row_fails_its_own_request_only(fault, words):
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, top_p=0.8, logprobs=1),
        SamplingParams(seed=2, top_k=3),
        SamplingParams(seed=3),
    ]
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    expected = alone(logits, params, position=10)
    for broken in range(4):
        spoiled = logits.clone()
        spoiled[broken, slice(None) if fault == -inf else 77] = fault
        result = sample(spoiled, rows_of(params, 200).select((0, 1, 2, 3), [10, 11, 12, 13]))
        errors = result.errors()
        assert list(errors) == [broken]
        with pytest.raises(SamplingError, match=f"request {broken}: .*{words}"):
            raise errors[broken]
        assert [t for i, t in enumerate(result.tokens.tolist()) if i != broken] == [
            t for i, t in enumerate(expected) if i != broken
        ]


def test_min_tokens_masks_eos_and_stop_ids_until_they_may_stop():
    """CASES S4, for the choice of tokens; position 10 is the first output token of request 0."""
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[4], ignore_eos=True)
    stops = TokenStops.for_request(params, eos_token_ids=[5, 6])
    rows = SamplingRows(8)
    rows.add(0, params, seed=0, prompt_ids=[0] * 10, suppressed_ids=stops.suppressed_ids)
    rows.add(1, SamplingParams(temperature=0.0), seed=0, prompt_ids=[0] * 10)
    rows.add(2, replace(params, temperature=1.0), seed=0, prompt_ids=[0] * 10, suppressed_ids=(4, 5, 6))
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 90.0, 91.0, 92.0, -inf]]).repeat(3, 1)
    chosen = [sample(logits.clone(), rows.select((0, 1, 2), [p, p, p])).tokens.tolist() for p in (10, 11, 12)]
    assert chosen[0][:2] == chosen[1][:2] == [3, 6]
    assert chosen[0][2] < 4
    assert chosen[1][2] < 4
    assert chosen[2] == [6, 6, 6]


def test_suppressing_every_token_is_an_error_of_that_request():
    rows = SamplingRows(3)
    rows.add(8, SamplingParams(min_tokens=1), seed=0, prompt_ids=[0] * 4, suppressed_ids=(0, 1, 2))
    rows.add(9, SamplingParams(), seed=0, prompt_ids=[0] * 4)
    assert list(sample(torch.zeros(2, 3), rows.select((9, 8), [4, 4])).errors()) == [8]


def test_samples_of_one_prompt_differ_and_are_reproducible():
    def tokens(sample_index: int) -> list[int]:
        rows = SamplingRows(1000)
        rows.add(0, SamplingParams(n=2), seed=42, prompt_ids=[0] * 5, sample_index=sample_index)
        return [int(sample(torch.zeros(1, 1000), rows.select((0,), [p])).tokens) for p in range(5, 25)]

    assert tokens(0) == tokens(0)
    assert tokens(1) == tokens(1)
    assert sum(a == b for a, b in zip(tokens(0), tokens(1), strict=True)) <= 1


@settings(deadline=None)
@given(st.lists(tied_logits, min_size=1, max_size=300), st.data())
def test_top_tokens_come_in_exact_order(logits, data):
    count = data.draw(st.integers(0, len(logits)))
    _, ids = top_tokens(torch.tensor([logits, logits[::-1]]), count)
    for row, found in zip((logits, logits[::-1]), ids.tolist(), strict=True):
        assert found == sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
