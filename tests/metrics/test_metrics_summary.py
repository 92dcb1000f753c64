import json
import math
from typing import Any

import numpy as np
import pytest
from metrics_hand_records import MS, hand_record
from metrics_toy_runs import toy_record

from pagedserve.metrics.record import RecordError, RunRecord
from pagedserve.metrics.summary import Slo, Summary, summarize
from pagedserve.metrics.tokens import token_times


def step(schedule_ms: int, commit_ms: int, **columns: int) -> dict[str, int]:
    return {"schedule_ns": schedule_ms * MS, "commit_ns": commit_ms * MS, **columns}


def two_requests() -> RunRecord:
    """Prefill first, depth 0: request 1's prefill (step 2) holds up request 0's decode. 10 x 4 slots."""
    return hand_record(
        [
            step(0, 10, num_prefill_tokens=8, num_running=1, num_blocks_used=2),
            step(
                11,
                20,
                num_decode_tokens=1,
                num_running=1,
                num_waiting=1,
                num_blocks_used=3,
                num_wasted_slots=3,
            ),
            step(21, 40, num_prefill_tokens=5, num_running=2, num_blocks_used=5, num_wasted_slots=6),
            step(41, 50, num_decode_tokens=2, num_running=2, num_blocks_used=5, num_wasted_slots=4),
        ],
        [
            {
                "request": 0,
                "arrival_ns": 0,
                "num_prompt_tokens": 8,
                "num_output_tokens": 3,
                "first_schedule_ns": 0,
                "finish_ns": 50 * MS,
            },
            {
                "request": 1,
                "arrival_ns": 12 * MS,
                "num_prompt_tokens": 9,
                "num_output_tokens": 2,
                "first_schedule_ns": 21 * MS,
                "finish_ns": 50 * MS,
                "finish_reason": "stop",
                "num_prefix_hit_tokens": 4,
            },
        ],
        [(0, 0, 3), (1, 2, 2)],
    )


def close(summary: Summary, **expected: float) -> None:
    found = {name: getattr(summary, name) for name in expected}
    assert found == pytest.approx(expected, rel=1e-12)


def test_latencies_by_hand() -> None:
    summary = summarize(two_requests())
    # Tokens of request 0 at 10, 20, 50 ms; of request 1, which arrived at 12 ms, at 40, 50 ms.
    close(
        summary, ttft_mean_s=0.019, ttft_p50_s=0.019, ttft_p90_s=0.0262, ttft_p99_s=0.02782, ttft_max_s=0.028
    )
    close(summary, itl_mean_s=0.05 / 3, itl_p50_s=0.010, itl_p90_s=0.026, itl_p99_s=0.0296, itl_max_s=0.030)
    close(summary, itl_request_max_mean_s=0.020, itl_request_max_p50_s=0.020, itl_request_max_p90_s=0.028)
    close(summary, tpot_mean_s=0.015, tpot_max_s=0.020, e2e_mean_s=0.044, e2e_p50_s=0.044, e2e_max_s=0.050)
    close(summary, queue_time_mean_s=0.0045, queue_time_p50_s=0.0045, queue_time_max_s=0.009)


def test_throughput_by_hand() -> None:
    summary = summarize(two_requests())
    close(summary, duration_s=0.050, output_tokens_per_s=100, total_tokens_per_s=22 / 0.05, requests_per_s=40)
    close(summary, num_requests=2, num_finished=2, num_output_tokens=5, num_prompt_tokens=17, num_steps=4)
    assert summary.finish_reasons == {"stop": 1, "length": 1}


def test_memory_and_load_by_hand() -> None:
    summary = summarize(two_requests())
    # The four states held 11, 10, 20 and 9 ms.
    used = 2 * 11 + 3 * 10 + 5 * 20 + 5 * 9
    wasted = 3 * 10 + 6 * 20 + 4 * 9
    close(summary, kv_occupancy_mean=used / 50 / 10, kv_occupancy_peak=0.5, waste_mean=wasted / (used * 4))
    close(summary, num_running_mean=(11 + 10 + 40 + 18) / 50, num_running_peak=2)
    close(summary, num_waiting_mean=10 / 50, num_waiting_peak=1, prefix_hit_rate=4 / 17)


def test_idle_time_dilutes_occupancy_but_not_waste() -> None:
    def run(second_starts_ms: int) -> Summary:
        later = second_starts_ms
        state = {"num_running": 1, "num_blocks_used": 5, "num_wasted_slots": 5, "num_decode_tokens": 1}
        requests = [
            {"request": i, "arrival_ns": at * MS, "first_schedule_ns": at * MS, "finish_ns": (at + 10) * MS}
            for i, at in enumerate((0, later))
        ]
        for request in requests:
            request["num_output_tokens"] = 1
        return summarize(
            hand_record(
                [step(0, 10, **state), step(later, later + 10, **state)], requests, [(0, 0, 1), (1, 1, 1)]
            )
        )

    close(run(10), kv_occupancy_mean=0.5, num_running_mean=1, waste_mean=0.25)
    close(run(90), kv_occupancy_mean=0.1, num_running_mean=0.2, waste_mean=0.25)


def test_overlapped_states_hold_until_the_next_plan() -> None:
    # Depth 1: planned at 0, 1, 11 ms, committed at 10, 20, 30: the states held 1, 10 and 19 ms.
    steps = [
        step(0, 10, num_prefill_tokens=4, num_running=1, num_blocks_used=1),
        step(1, 20, num_decode_tokens=1, num_running=1, num_blocks_used=2, num_wasted_slots=3),
        step(
            11,
            30,
            num_decode_tokens=1,
            num_running=1,
            num_blocks_used=2,
            num_wasted_slots=2,
            num_discarded_tokens=1,
        ),
    ]
    request = {"request": 0, "num_output_tokens": 2, "first_schedule_ns": 0, "finish_ns": 20 * MS}
    summary = summarize(hand_record(steps, [request], [(0, 0, 2)], overlap_depth=1))
    used = 1 * 1 + 2 * 10 + 2 * 19
    close(summary, kv_occupancy_mean=used / 30 / 10, waste_mean=(3 * 10 + 2 * 19) / (used * 4))
    close(summary, num_discarded_tokens=1, itl_p50_s=0.010, e2e_p50_s=0.020, num_running_mean=1)


def test_preemption_stretches_one_gap_and_counts_its_work() -> None:
    steps = [
        step(0, 10, num_prefill_tokens=3, num_blocks_used=1),
        step(10, 20, num_decode_tokens=1, num_blocks_used=1),
        step(20, 30, num_prefill_tokens=6, num_preemptions=1, num_waiting=1, num_blocks_used=2),
        step(30, 50, num_prefill_tokens=5, num_recomputed_tokens=5, num_blocks_used=2),
        step(50, 60, num_decode_tokens=2, num_blocks_used=4),
    ]
    requests: list[dict[str, Any]] = [
        {"request": 0, "num_output_tokens": 4, "first_schedule_ns": 0, "finish_ns": 60 * MS},
        {"request": 1, "num_output_tokens": 2, "first_schedule_ns": 20 * MS, "finish_ns": 60 * MS},
    ]
    summary = summarize(hand_record(steps, requests, [(0, 0, 2), (0, 3, 2), (1, 2, 2)]))
    # Request 0 at 10, 20, 50, 60; request 1 at 30, 60. TTFT counts once, from arrival at 0.
    close(summary, num_preemptions=1, num_recomputed_tokens=5, recomputed_share=5 / 17)
    close(summary, itl_max_s=0.030, itl_mean_s=0.020, ttft_max_s=0.030, ttft_p50_s=0.020, tpot_max_s=0.030)


def with_outcomes() -> RunRecord:
    """Tokens at 10, 20, ... ms; requests that end in every way."""
    steps = [step(10 * i, 10 * i + 10, num_decode_tokens=3) for i in range(6)]
    requests = [
        {
            "request": 0,
            "num_output_tokens": 3,
            "first_schedule_ns": 0,
            "finish_reason": "stop",
            "num_prefix_hit_tokens": 1,
        },
        {"request": 1, "num_output_tokens": 1, "first_schedule_ns": 0},
        {"request": 2, "num_output_tokens": 2, "first_schedule_ns": 0, "finish_reason": "abort"},
        {"request": 3, "num_output_tokens": 6, "first_schedule_ns": 0, "finish_reason": "unfinished"},
        {"request": 4, "first_schedule_ns": 10 * MS, "finish_reason": "timeout"},
        {"request": 5, "finish_reason": "refused", "num_prompt_tokens": 500},
    ]
    return hand_record(steps, requests, [(0, 0, 3), (1, 0, 1), (2, 0, 2), (3, 0, 6)])


def test_requests_cut_short_have_a_ttft_and_gaps_but_no_end() -> None:
    summary = summarize(with_outcomes())
    assert summary.finish_reasons == {
        "stop": 1,
        "length": 1,
        "abort": 1,
        "timeout": 1,
        "refused": 1,
        "unfinished": 1,
    }
    close(summary, num_requests=6, num_finished=2, num_output_tokens=12, output_tokens_per_s=12 / 0.06)
    close(summary, ttft_max_s=0.010, itl_max_s=0.010, tpot_max_s=0.010, e2e_max_s=0.030, e2e_mean_s=0.020)
    close(summary, requests_per_s=2 / 0.06, total_tokens_per_s=16 / 0.06, queue_time_max_s=0.010)
    close(summary, prefix_hit_rate=1 / 5)  # the prompt that was refused counts on neither side


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(ttft_s=0.010), 2),
        (Slo(ttft_s=0.0099), 0),
        (Slo(e2e_s=0.029), 1),
        (Slo(tpot_s=0.009), 1),  # the reply of one token has no time per token to miss
        (Slo(ttft_s=1, tpot_s=1, e2e_s=1), 2),
        (Slo(ttft_s=1, tpot_s=0.009, e2e_s=0.001), 0),
    ],
)
def test_goodput_counts_finished_requests_within_every_bound(slo: Slo, num_good: int) -> None:
    summary = summarize(with_outcomes(), slo)
    close(summary, slo_attainment=num_good / 6, goodput_per_s=num_good / 0.06)


@pytest.mark.parametrize(
    "bounds", [{}, {"ttft_s": 0.0}, {"ttft_s": 1.0, "e2e_s": -1.0}, {"tpot_s": math.nan}]
)
def test_an_slo_that_asks_nothing_or_the_impossible_is_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least one bound, each above 0 s"):
        Slo(**bounds)


def test_without_an_slo_there_is_no_goodput() -> None:
    values = summarize(with_outcomes()).as_dict()
    assert values["slo_attainment"] is None
    assert values["goodput_per_s"] is None


def test_nothing_measured_is_null_in_json_never_nan() -> None:
    values = summarize(hand_record([], [], [], limits={}), Slo(ttft_s=1)).as_dict()
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text) == values
    assert {name: value for name, value in values.items() if value} == {}
    for name in ("ttft_p50_s", "itl_max_s", "output_tokens_per_s", "kv_occupancy_mean", "waste_mean"):
        assert values[name] is None


def test_a_lifelike_summary_is_plain_json() -> None:
    values = summarize(toy_record(), Slo(ttft_s=1)).as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert None not in values.values()


def test_percentiles_are_linear() -> None:
    record = toy_record(num_requests=37)
    tokens = token_times(record)
    ttft = np.sort((tokens.time_ns[tokens.offsets[:-1]] - record.array("requests", "arrival_ns")) / 1e9)
    place = 0.9 * 36
    expected = ttft[int(place)] + (place - int(place)) * (ttft[int(place) + 1] - ttft[int(place)])
    assert summarize(record).ttft_p90_s == pytest.approx(expected, rel=1e-12)


def test_a_pool_without_limit_has_no_occupancy() -> None:
    record = two_requests()
    unlimited = RunRecord(
        {**record.header, "limits": {"block_size": 4, "num_blocks": None}},
        record.steps,
        record.requests,
        record.emissions,
        record.calls,
    )
    summary = summarize(unlimited)
    assert math.isnan(summary.kv_occupancy_mean)
    assert math.isnan(summary.kv_occupancy_peak)
    assert summary.waste_mean == summarize(record).waste_mean


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"num_blocks": 10}, "limits.block_size: expected an integer of at least 1, found None"),
        ({"num_blocks": 10, "block_size": 0}, "limits.block_size: .* found 0"),
        ({"num_blocks": 0, "block_size": 4}, "limits.num_blocks: expected null or at least 1, found 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any], message: str) -> None:
    record = two_requests()
    odd = RunRecord(
        {**record.header, "limits": limits}, record.steps, record.requests, record.emissions, record.calls
    )
    with pytest.raises(RecordError, match=message):
        summarize(odd)


def test_unlimited_memory_and_reserved_memory_differ_in_waste_as_they_should() -> None:
    paged = summarize(toy_record(num_blocks=4000))
    reserved = summarize(toy_record(num_blocks=4000, reserve=2048))
    assert paged.waste_mean < 0.10 < 0.5 < reserved.waste_mean < 1
