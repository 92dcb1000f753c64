"""Random tokens by kernels: from equal weights and words exactly the tokens of the sampler's torch code."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, nan_filled, random_tensor

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling import draws
from pagedserve.engine.sampling.fixed_point import fixed_point_weights
from pagedserve.engine.sampling.kernel_choice import choose_by_kernels
from pagedserve.engine.sampling.rows import SamplingBatch, SamplingRows
from pagedserve.engine.sampling.sampler import choose_in_torch
from pagedserve.kernels import sampling
from pagedserve.kernels.sampling import MAX_VOCAB, weigh

CHUNK = 64
"""Small, so that short rows have several."""
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([-1, 0, 0, 1, 2, 3, 7, 100, 127, 128, 150, 1000]),
    top_p=st.sampled_from([1e-300, 1e-6, 0.3, 0.5, 0.9, 0.999999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def batch_of(params: list[SamplingParams], vocab_size: int, position: int = 10) -> SamplingBatch:
    rows = SamplingRows(vocab_size, DEVICE)
    for request, one in enumerate(params):
        rows.add(request, one, seed=one.seed or 0, prompt_ids=[0])
    return rows.select(tuple(range(len(params))), [position + request for request in range(len(params))])


def compare(logits: torch.Tensor, batch: SamplingBatch, chunk: int = CHUNK) -> list[int]:
    """Tokens by kernels, after they were found equal to torch's from the very weights that the kernels used."""
    left = logits.clone()
    with nan_filled():
        tokens, peaks = choose_by_kernels(left, batch, chunk)
    # In the random rows the weights are left; min_p's zeros are there already and do not change again.
    with mock.patch.object(draws, "fixed_point_weights", lambda weights, *_: weights.to(torch.int64)):
        expected, _ = choose_in_torch(left.clone(), batch)
    assert tokens.tolist() == expected.tolist()
    assert torch.equal(peaks, logits.amax(-1))
    return tokens.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_mixture_of_filters(data: st.DataObject) -> None:
    params = data.draw(st.lists(any_params, min_size=1, max_size=4))
    vocab_size = data.draw(st.sampled_from([2, 9, 63, 64, 65, 200]))
    spread = data.draw(st.sampled_from([0.0, 0.01, 0.5, 3.0, 10.0]))
    logits = random_tensor(len(params), vocab_size, seed=data.draw(st.integers(0, 1000))) * spread
    if data.draw(st.booleans()):
        logits = logits.bfloat16().float()  # full of ties
    if data.draw(st.booleans()):
        logits[:, 1:] = logits[:, 1:].masked_fill(logits[:, 1:] < 0, -math.inf)
    compare(logits, batch_of(params, vocab_size, data.draw(st.integers(0, 2**33))))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -9.0, -1.0, 0.0, 0.5, 0.5, 2.0, 3.0]), min_size=1, max_size=90),
    any_params,
    st.integers(0, 2**33),
)
def test_rows_full_of_ties(row: list[float], params: SamplingParams, position: int) -> None:
    compare(torch.tensor([[*row, 1.0]], device=DEVICE), batch_of([params], len(row) + 1, position))


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("top_k", [0, 2, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_the_ends_of_the_uniform_never_reach_a_masked_token(word: int, top_k: int, top_p: float) -> None:
    logits = torch.full((1, 1000), -math.inf, device=DEVICE)
    logits[0, [3, 500, 997]] = torch.tensor([0.0, -60.0, 1.0], device=DEVICE)
    batch = batch_of([SamplingParams(top_k=top_k, top_p=top_p)], 1000)
    batch.words.fill_(word)
    first = 3 if top_p == 1.0 else 997  # of which 0.73 of the mass is
    assert compare(logits, batch) == [first if word < 2**30 else 997]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=127)])
def test_a_target_at_the_end_of_a_chunk_belongs_to_the_next_token(params: SamplingParams) -> None:
    """Half of the mass fills the first chunk to the last; the first token behind it weighs nothing."""
    num_tokens = 2 * CHUNK + 1
    logits = torch.zeros(1, num_tokens, device=DEVICE)
    logits[0, CHUNK] = -math.inf
    batch = batch_of([params], num_tokens)
    num_kept = 127 if params.top_k else 128
    batch.words.fill_(math.ceil(2**32 * CHUNK / num_kept))
    assert compare(logits, batch) == [CHUNK + 1]


def test_a_vocabulary_as_launched() -> None:
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7, top_p=0.95),
        SamplingParams(seed=4, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=5, temperature=3.0, top_p=0.99),
        SamplingParams(seed=3, top_k=2_000),
    ]
    logits = random_tensor(len(params), 50_257) * 3
    compare(logits, batch_of(params, 50_257), sampling.CHUNK)


def test_no_neighbour_changes_a_row() -> None:
    params = [SamplingParams(seed=i, top_k=i % 3 * 4, top_p=(1.0, 0.7)[i % 2]) for i in range(7)]
    logits = random_tensor(7, 150) * 2
    together = compare(logits, batch_of(params, 150))
    for row, one in enumerate(params):
        assert compare(logits[row : row + 1], batch_of([one], 150, 10 + row)) == together[row : row + 1]


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # infinity less itself
def test_rows_that_are_broken_end_and_leave_the_others_alone() -> None:
    params = [SamplingParams(seed=i, top_k=5 * (i % 2), top_p=0.8) for i in range(5)]
    logits = random_tensor(5, 150)
    sound = choose_by_kernels(logits.clone(), batch_of(params, 150), CHUNK)[0].tolist()
    logits[0], logits[1, 7], logits[2, 9] = -math.inf, math.nan, math.inf
    tokens, peaks = choose_by_kernels(logits, batch_of(params, 150), CHUNK)
    assert tokens.tolist()[3:] == sound[3:]
    assert all(0 <= token < 150 for token in tokens.tolist())
    assert torch.isfinite(peaks).tolist() == [False, False, False, True, True]


def test_padded_columns_are_never_chosen_nor_changed() -> None:
    padded = random_tensor(3, 200)
    padded[:, 130:] = 1e9
    params = [SamplingParams(seed=1), SamplingParams(seed=2, top_k=3), SamplingParams(seed=3, top_p=0.5)]
    batch = batch_of(params, 130)
    expected = compare(padded[:, :130].contiguous(), batch)
    assert choose_by_kernels(padded[:, :130], batch, CHUNK)[0].tolist() == expected
    assert (padded[:, 130:] == 1e9).all()


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 100.0])
def test_weights_are_those_of_the_sampler(temperature: float) -> None:
    """Within the last places of exp, whole numbers, and the sums are theirs exactly."""
    logits = random_tensor(4, 150) * 5
    rows = torch.tensor([2, 0], device=DEVICE)
    peaks, temperatures = logits.amax(-1), torch.full((2,), temperature, device=DEVICE)
    expected = fixed_point_weights(logits[rows], peaks[rows], temperatures)
    left, least = logits.clone(), torch.tensor([0, 2**36], device=DEVICE)
    with nan_filled():
        masses, counts = weigh(left, peaks, rows, temperatures, least, CHUNK)
    found = left[rows].to(torch.int64)
    assert torch.equal(left[rows], found.float())
    kept = found * (found >= least.unsqueeze(-1))
    assert torch.equal(kept, found)
    assert (found.amax(-1) == 2**40).all()
    close = (found - expected).abs() <= expected * 3e-6 + 1
    assert (close | (expected < least.unsqueeze(-1) * 1.001)).all()
    parts = torch.nn.functional.pad(found, (0, 3 * CHUNK - 150)).view(2, 3, CHUNK)
    assert torch.equal(masses, parts.sum(-1))
    assert torch.equal(counts, (parts > 0).sum(-1).int())
    others = [1, 3]
    assert torch.equal(left[others], logits[others])


def test_wrong_inputs_are_caught() -> None:
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    with pytest.raises(AssertionError, match="can overflow 63 bits"):
        weigh(torch.empty(1, MAX_VOCAB + 1, device=DEVICE), ones, rows, ones, rows)
    with pytest.raises(AssertionError, match="must lie together"):
        weigh(random_tensor(4, 3).T, ones, rows, ones, rows)
