"""Traffic is scaled to the device: lengths that fit, a rate that is a share of a simulated capacity."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pagedserve.metrics.summary import summarize
from pagedserve.policy import Limits, policy
from pagedserve.simulator.constant import ConstantCost
from pagedserve.traces.requests import to_requests
from pagedserve.traces.sample_files import sample
from pagedserve.traces.transforms import first
from pagedserve.validation.planning import Setting, capacity_rps, plan_traffic, usable_scale

COST = ConstantCost(10_000_000, per_prefill_token_ns=500_000, per_decode_ns=1_000_000)
LIMITS = Limits(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=1024, num_blocks=1024)
SETTING = Setting(policy("mixed"), LIMITS)
TRACE = first(sample("azure_shaped_500"), 60)


def test_capacity_is_what_a_run_with_everything_waiting_serves():
    small = plan_traffic(TRACE, SETTING, COST, fit=True, rate=math.inf).trace
    assert len(np.unique(small.arrival_ns)) == 1
    record = SETTING.simulated(small, COST)
    assert capacity_rps(small, SETTING, COST) == pytest.approx(summarize(record).requests_per_s, rel=0.02)


@pytest.mark.parametrize("load", [0.5, 0.85, 2.0])
def test_a_load_is_a_share_of_the_capacity(load: float):
    traffic = plan_traffic(TRACE, SETTING, COST, load=load, length_scale=0.1)
    assert traffic.rate == pytest.approx(load * traffic.capacity_rps)
    assert traffic.trace.describe().rate_per_s == pytest.approx(traffic.rate, rel=1e-6)
    assert traffic.length_scale == 0.1
    # Its pattern is the trace's own: gaps keep their proportions.
    gaps, own = np.diff(traffic.trace.arrival_ns), np.diff(TRACE.arrival_ns)
    np.testing.assert_allclose(gaps / gaps.sum(), own / own.sum(), atol=1e-6)


@pytest.mark.parametrize("run_s", [5.0, 30.0])
def test_a_fitted_run_fits_the_model_and_the_time(run_s: float):
    traffic = plan_traffic(TRACE, SETTING, COST, load=0.7, fit=True, run_s=run_s)
    longest = traffic.trace.num_prompt_tokens + traffic.trace.num_output_tokens
    assert longest.max() <= LIMITS.max_model_len
    assert run_s / 1.3 < len(TRACE) / traffic.rate <= run_s


def test_a_device_with_room_keeps_the_lengths():
    roomy = replace(SETTING, limits=replace(LIMITS, max_model_len=20_000, num_blocks=20_000))
    traffic = plan_traffic(TRACE, roomy, ConstantCost(1_000), fit=True)
    assert traffic.length_scale == 1.0
    np.testing.assert_array_equal(traffic.trace.num_prompt_tokens, TRACE.num_prompt_tokens)


def test_block_ids_keep_whole_blocks_that_the_engine_can_use():
    trace = first(sample("shared_prefix_200"), 40)
    assert trace.blocks is not None
    for wanted in (0.9, 0.3, 0.01):
        scale = usable_scale(trace, wanted, LIMITS.block_size)
        size = scale * trace.blocks.block_size
        assert size == int(size)
        assert scale <= max(wanted, 1 / trace.blocks.block_size)
    traffic = plan_traffic(trace, Setting(policy("vllm_v1"), LIMITS), COST, fit=True)
    to_requests(traffic.trace, LIMITS.block_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load": 0.0}, "load is 0.0; it must be above 0"),
        ({"rate": -1.0}, "rate is -1.0; it must be above 0"),
        ({"length_scale": 0.5, "fit": True}, "give one of them"),
    ],
)
def test_contradictions_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        plan_traffic(TRACE, SETTING, COST, **options)


def test_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="the trace is empty"):
        plan_traffic(TRACE[:0], SETTING, COST)


def test_requests_of_one_instant_have_no_rate_to_scale():
    alone = TRACE[:1]
    traffic = plan_traffic(alone, SETTING, COST, load=0.5, length_scale=0.1)
    assert traffic.as_dict()["rate_requests_per_s"] is None
    assert traffic.as_dict()["load"] is None
    with pytest.raises(ValueError, match="two different arrival times"):
        plan_traffic(alone, SETTING, COST, rate=2.0, length_scale=0.1)


def test_a_rate_too_slow_for_the_time_aimed_at_is_told_before_the_search():
    with pytest.raises(ValueError, match=r"60 requests at 0.1/s take 600 s, and 60 s were aimed at"):
        plan_traffic(TRACE, SETTING, COST, rate=0.1, fit=True)
