"""Whole production traces through the simulator, against arithmetic done from the trace itself."""

from pathlib import Path

import numpy as np
import pytest

from pagedserve.metrics.summary import Summary, summarize
from pagedserve.policy import Limits, Outcome, Policy, Scheduler, policy
from pagedserve.simulator.devices import device, fit_num_blocks
from pagedserve.simulator.geometry import geometry
from pagedserve.simulator.roofline import RooflineCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.readers import read_trace
from pagedserve.traces.requests import to_requests
from pagedserve.traces.trace import Trace
from pagedserve.traces.transforms import first, with_rate

SHARED = Path(__file__).parents[3] / "shared" / "traces"
AZURE = SHARED / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
MODEL, DEVICE = geometry("Llama-3.1-8B"), device("h200")

needs_azure = pytest.mark.skipif(not AZURE.exists(), reason="the Azure 2023 trace is not beside the checkout")


@needs_azure
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_whole_azure_conversation_trace_runs_under_check() -> None:
    """19,366 requests, half a million steps, every invariant after every call; waste below 4 %."""
    trace = read_trace(AZURE)
    # The pool is cut to little more than this load uses, or recomputing its invariants takes hours.
    limits = Limits(num_blocks=4096, max_num_seqs=1024)
    record = simulate(trace, "vllm_v1", RooflineCost(DEVICE, MODEL), limits, check=True)
    summary = summarize(record)
    assert summary.num_finished == 19_366
    assert summary.num_output_tokens == int(trace.num_output_tokens.sum())
    assert summary.waste_mean < 0.04


@needs_azure
def test_the_whole_azure_conversation_trace_with_the_whole_device() -> None:
    limits = Limits(num_blocks=fit_num_blocks(DEVICE, MODEL), max_num_seqs=1024)
    trace = read_trace(AZURE)
    summary = summarize(simulate(trace, "vllm_v1", RooflineCost(DEVICE, MODEL), limits))
    assert summary.num_finished == 19_366
    assert summary.num_output_tokens == int(trace.num_output_tokens.sum())
    assert 0.0 < summary.waste_mean < 0.04
    assert summary.num_preemptions == 0


# A pool of 32,768 tokens and the first 500 requests at once: memory decides what runs.
POOL = Limits(num_blocks=2048, max_num_seqs=1024, max_num_batched_tokens=2048, max_model_len=16384)


def pressed(trace: Trace, spec: Policy) -> Summary:
    return summarize(simulate(trace, spec, RooflineCost(DEVICE, MODEL), POOL))


@needs_azure
def test_peak_running_under_a_small_pool_is_what_the_trace_says() -> None:
    """Paged against reserving the maximum and reserving prompt + limit, within 10 % of hand arithmetic.

    contiguous_max runs pool / max_model_len. contiguous_limit runs as many as fit side by side when each
    takes prompt + max_tokens. paged runs as many as fit with what they hold: at the peak the running
    requests are nearly all fresh, so each holds its prompt and few output tokens.
    """
    trace = with_rate(first(read_trace(AZURE), 500), 1e4)
    limit = int(trace.num_output_tokens.max())
    prompts = trace.num_prompt_tokens
    size, slots = POOL.block_size, POOL.num_slots

    by_max = pressed(trace, policy("mixed", allocator="contiguous_max"))
    by_limit = pressed(trace, policy("mixed", allocator="contiguous_limit"))
    paged = pressed(trace, policy("mixed", watermark=0.0))

    assert by_max.num_running_peak == slots // POOL.max_model_len == 2
    expected_limit = most_side_by_side(-(-(prompts + limit) // size), POOL.num_blocks)
    assert by_limit.num_running_peak == pytest.approx(expected_limit, rel=0.10)
    expected_paged = most_side_by_side(-(-prompts // size), POOL.num_blocks)
    assert paged.num_running_peak == pytest.approx(expected_paged, rel=0.10)

    assert paged.waste_mean < 0.04
    assert by_limit.waste_mean > 5 * paged.waste_mean
    assert by_max.waste_mean > by_limit.waste_mean
    assert paged.output_tokens_per_s > by_limit.output_tokens_per_s > by_max.output_tokens_per_s


def most_side_by_side(blocks: np.ndarray, num_blocks: int) -> int:
    """The longest run of consecutive requests, in order of arrival, that fits the pool together."""
    ends = np.concatenate([[0], np.cumsum(blocks)])
    starts = np.searchsorted(ends, ends - num_blocks, side="left")
    return int((np.arange(len(ends)) - starts).max())


@pytest.mark.parametrize(
    ("name", "block_size", "hits", "full"),
    [
        ("conversation_trace.rows1-9000.jsonl.gz", 512, 77_227, 209_848),
        ("synthetic_trace.rows1-3000.jsonl.gz", 512, 40_224, 78_714),
        ("conversation_trace.rows1-9000.jsonl.gz", 16, 2_472_514, 6_862_041),
        ("synthetic_trace.rows1-3000.jsonl.gz", 16, 1_288_329, 2_554_192),
    ],
)
def test_mooncake_full_block_hits(name: str, block_size: int, hits: int, full: int) -> None:
    """An unlimited pool and requests served one after another: hits are exactly those of the trace."""
    path = SHARED / "mooncake" / name
    if not path.exists():
        pytest.skip("the Mooncake traces are not beside the checkout")
    trace = read_trace(path)
    limits = Limits(
        max_num_batched_tokens=1 << 20, max_model_len=1 << 20, block_size=block_size, num_blocks=full + 10_000
    )
    scheduler = Scheduler(policy("serial", enable_prefix_caching=True, watermark=0.0), limits)
    hit_tokens = 0
    for request in to_requests(trace, block_size, max_tokens=1):
        scheduler.add(request, 0)
        plan = scheduler.schedule(0)
        hit_tokens += plan.num_prefix_hit_tokens
        assert plan.step is not None
        scheduler.commit(plan.step, [Outcome(r, 1, None, ()) for r, _ in plan.filled], 0)
        assert not scheduler.has_work
    assert hit_tokens % block_size == 0
    assert hit_tokens // block_size == hits
    assert int((trace.num_prompt_tokens // block_size).sum()) == full
