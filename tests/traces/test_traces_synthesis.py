"""Synthetic traces: arrivals, lengths, shared prefixes, reproducibility."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pagedserve.traces.lengths import Empirical, Fixed, LengthDist, LogNormal, TraceLengths, Uniform
from pagedserve.traces.report import TraceError
from pagedserve.traces.requests import to_requests
from pagedserve.traces.sample_files import FOLDER, SAMPLES, named_trace, sample, sample_names, sample_path
from pagedserve.traces.synthesis import SharedPrefixes, arrival_times, synthesize
from pagedserve.traces.trace import Trace


def draw(dist: LengthDist, size: int = 20_000) -> np.ndarray:
    return dist.sample(np.random.Generator(np.random.PCG64(1)), size)


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    arrivals = arrival_times(50_000, 20.0, seed=3)
    gaps = np.diff(arrivals, prepend=0) / 1e9
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, quantile) == pytest.approx(-math.log(1 - quantile) / 20, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_gap_cv(burstiness: float) -> None:
    gaps = np.diff(arrival_times(50_000, 5.0, burstiness, seed=4))
    assert gaps.mean() == pytest.approx(0.2e9, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_constant_arrivals_are_exact() -> None:
    assert arrival_times(4, 8.0, math.inf).tolist() == [125_000_000, 250_000_000, 375_000_000, 500_000_000]
    assert np.diff(arrival_times(1000, 3.0, math.inf)).max() == 333_333_334


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, math.inf).tolist() == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.01, 0.5, 1.0, math.inf])
@pytest.mark.parametrize("num_requests", [1, 7, 1000])
def test_rescaled_arrivals_end_at_the_stated_time(burstiness: float, num_requests: int) -> None:
    for seed in range(5):
        arrivals = arrival_times(num_requests, 7.0, burstiness, seed=seed, rescale=True)
        assert arrivals[-1] == round(num_requests / 7.0 * 1e9)
        assert bool(np.all(np.diff(arrivals) >= 0))
        years = arrival_times(num_requests, 1e-5 / 7, burstiness, seed=seed, rescale=True)
        assert years[-1] == round(num_requests / (1e-5 / 7) * 1e9)  # past the nanoseconds a float can count
    plain = arrival_times(1000, 7.0, seed=2)
    scaled = arrival_times(1000, 7.0, seed=2, rescale=True)
    np.testing.assert_allclose(scaled / scaled[-1], plain / plain[-1], rtol=1e-6)


def test_fixed_and_uniform_lengths() -> None:
    assert set(draw(Fixed(7)).tolist()) == {7}
    uniform = draw(Uniform(3, 6))
    assert set(uniform.tolist()) == {3, 4, 5, 6}
    assert np.bincount(uniform)[3:].min() > 0.9 * len(uniform) / 4


def test_log_normal_lengths_by_any_statement() -> None:
    sigma = math.sqrt(math.log1p(0.5**2))
    by_mean = LogNormal(mean=1000, cv=0.5)
    by_median = LogNormal(median=1000 * math.exp(-(sigma**2) / 2), sigma=sigma)
    assert by_mean.parameters() == pytest.approx(by_median.parameters())
    lengths = draw(by_mean)
    assert lengths.mean() == pytest.approx(1000, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.03)
    assert np.median(draw(LogNormal(median=300, sigma=1.0))) == pytest.approx(300, rel=0.03)
    clipped = draw(LogNormal(median=300, sigma=1.0, minimum=100, maximum=500))
    assert (clipped.min(), clipped.max()) == (100, 500)
    assert set(draw(LogNormal(median=9, sigma=0.0)).tolist()) == {9}


def test_lengths_from_a_trace_apart_and_together() -> None:
    source = Trace.of("source", range(4), [10, 20, 30, 40], [1, 2, 3, 4])
    joint = synthesize(500, 1.0, lengths=TraceLengths(source), seed=1)
    assert (joint.num_prompt_tokens == 10 * joint.num_output_tokens).all()
    assert set(joint.num_output_tokens.tolist()) == {1, 2, 3, 4}
    prompt, output = Empirical(source.num_prompt_tokens), Empirical(source.num_output_tokens)
    apart = synthesize(500, 1.0, prompt=prompt, output=output, seed=1)
    assert set(apart.num_prompt_tokens.tolist()) == {10, 20, 30, 40}
    assert abs(np.corrcoef(apart.num_prompt_tokens, apart.num_output_tokens)[0, 1]) < 0.2


def make(seed: int = 5, **changes: Any) -> Trace:
    arguments: dict[str, Any] = {"prompt": Uniform(1, 99), "output": Uniform(1, 9), "seed": seed}
    return synthesize(100, 10.0, **(arguments | changes))


def test_same_arguments_same_trace_other_seed_other_trace() -> None:
    assert make().sha256() == make().sha256()
    assert make(6).sha256() != make().sha256()


def test_another_length_distribution_leaves_the_arrivals_as_they_were() -> None:
    other = make(prompt=LogNormal(median=50, sigma=1.0), prefixes=SharedPrefixes(2, 32))
    assert other.arrival_ns.tolist() == make().arrival_ns.tolist()
    assert other.num_output_tokens.tolist() == make().num_output_tokens.tolist()


def test_shared_prefixes() -> None:
    plain = make()
    trace = make(prefixes=SharedPrefixes(num_groups=3, prefix_tokens=40, block_size=16))
    assert (trace.num_prompt_tokens - plain.num_prompt_tokens == 40).all()
    assert trace.blocks is not None
    assert trace.blocks.broken_chains().size == 0
    heads = {tuple(trace.blocks.of(i)[:2].tolist()) for i in range(100)}
    assert heads == {(0, 1), (2, 3), (4, 5)}  # 40 tokens fill two blocks of 16; the third is each one's own
    tails = [i for row in range(100) for i in trace.blocks.of(row)[2:].tolist()]
    assert len(set(tails)) == len(tails)
    prefix = trace.describe().prefix
    assert prefix is not None
    assert prefix.num_hit_blocks == 2 * (100 - 3)
    assert len(to_requests(trace, 16)[0].prefix_keys or ()) == trace.num_prompt_tokens[0] // 16


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_requests": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"burstiness": -1.0},
        {"rate": 1e-12},
        {"seed": -1},
        {"output": None},
        {"lengths": TraceLengths(Trace.of("s", [0], [1], [1]))},
    ],
)
def test_impossible_wishes_are_refused(arguments: dict[str, Any]) -> None:
    valid: dict[str, Any] = {"num_requests": 5, "rate": 1.0, "prompt": Fixed(1), "output": Fixed(1)}
    synthesize(**valid)
    with pytest.raises(TraceError):
        synthesize(**(valid | arguments))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Fixed(0),
        lambda: Uniform(5, 4),
        lambda: LogNormal(median=5),
        lambda: LogNormal(median=5, mean=5, sigma=1),
        lambda: LogNormal(mean=0, sigma=1),
        lambda: LogNormal(mean=5, sigma=-1),
        lambda: LogNormal(mean=5, sigma=1, minimum=9, maximum=8),
        lambda: Empirical(np.array([], dtype=np.int64)),
        lambda: Empirical(np.array([0, 5])),
        lambda: TraceLengths(Trace.of("none", [], [], [])),
        lambda: SharedPrefixes(0, 16),
    ],
)
def test_impossible_distributions_are_refused(build: Any) -> None:
    with pytest.raises(TraceError):
        build()


def test_the_report_says_how_it_was_made() -> None:
    (step,) = make().report.steps
    assert "Uniform(low=1, high=99)" in step
    assert "seed=5" in step
    assert make().report.lines()[0] == "synthetic: format synthetic, 100 rows read, 100 kept"


@pytest.mark.parametrize("name", SAMPLES)
def test_packaged_samples_are_what_their_recipe_makes(name: str) -> None:
    packaged, made = sample(name), SAMPLES[name]()
    assert packaged.name == name
    # Not the digest: another platform's exp() may differ in the last bit before rounding.
    assert np.abs(packaged.arrival_ns - made.arrival_ns).max() <= 2
    assert np.abs(packaged.num_prompt_tokens - made.num_prompt_tokens).max() <= 1
    assert np.abs(packaged.num_output_tokens - made.num_output_tokens).max() <= 1
    assert packaged.sha256() in (FOLDER / "README.md").read_text()


def test_samples_are_listed_and_found() -> None:
    assert sample_names() == tuple(SAMPLES)
    assert {path.name for path in FOLDER.glob("*.gz")} == {sample_path(name).name for name in sample_names()}
    with pytest.raises(TraceError, match="'nothing'; choose one of azure_shaped_500"):
        sample("nothing")


def test_a_trace_is_named_by_its_sample_or_its_file() -> None:
    packaged = sample("azure_shaped_500")
    assert named_trace("sample:azure_shaped_500").sha256() == packaged.sha256()
    assert named_trace(str(sample_path("azure_shaped_500"))).sha256() == packaged.sha256()
    with pytest.raises(TraceError, match="no sample trace 'nothing'"):
        named_trace("sample:nothing")
    with pytest.raises(FileNotFoundError):
        named_trace("azure_shaped_500")


def test_the_azure_shaped_sample_has_the_published_shape() -> None:
    summary = sample("azure_shaped_500").describe()
    assert summary.prompt is not None
    assert summary.output is not None
    assert summary.rate_per_s == pytest.approx(5.53, rel=0.01)
    assert summary.gap_cv == pytest.approx(1.094, rel=0.05)
    assert summary.prompt.mean == pytest.approx(1154.7, rel=0.05)
    assert summary.output.mean == pytest.approx(211.1, rel=0.06)
    assert summary.output.max == 1000
