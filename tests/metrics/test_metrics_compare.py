import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from metrics_hand_records import MS, hand_record
from metrics_toy_runs import toy_record

from pagedserve.metrics.compare import (
    POLICY_COLUMNS,
    VALIDATED_METRICS,
    Shown,
    as_shown,
    compare,
    error_pct,
    ks_distances,
    policy_table,
)
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import summarize


def test_the_error_is_signed_and_relative_to_live() -> None:
    assert error_pct(200, 210) == 5
    assert error_pct(200, 150) == -25
    assert error_pct(0, 0) == 0
    assert math.isnan(error_pct(0, 1))
    assert math.isnan(error_pct(math.nan, 1))
    assert math.isnan(error_pct(1, math.nan))


def test_compare_puts_live_before_simulated() -> None:
    live = summarize(toy_record())
    simulated = replace(live, ttft_p50_s=live.ttft_p50_s * 1.1, num_running_peak=live.num_running_peak * 2)
    table = compare(live, simulated)
    assert table.columns.tolist() == ["live", "simulated", "error_pct"]
    assert table.index.tolist() == list(VALIDATED_METRICS)
    errors = table["error_pct"].to_dict()
    assert errors.pop("ttft_p50_s") == pytest.approx(10)
    assert errors.pop("num_running_peak") == 100
    assert set(errors.values()) == {0.0}


def test_compare_takes_records_and_any_metric() -> None:
    fast, slow = toy_record(base_ms=8), toy_record(base_ms=9)
    table = compare(fast, slow, ["itl_p99_s", "num_steps"])
    assert table.loc["itl_p99_s", "live"] == summarize(fast).itl_p99_s
    assert table.loc["itl_p99_s", "simulated"] == summarize(slow).itl_p99_s
    with pytest.raises(AttributeError, match="itl_p98_s"):
        compare(fast, slow, ["itl_p98_s"])


def test_metrics_that_validation_reports() -> None:
    assert VALIDATED_METRICS == (
        "output_tokens_per_s",
        "ttft_p50_s",
        "ttft_p90_s",
        "itl_p50_s",
        "itl_p90_s",
        "e2e_p50_s",
        "kv_occupancy_mean",
        "waste_mean",
        "num_running_peak",
    )


def test_policies_stand_in_rows_with_latency_and_memory_beside_throughput() -> None:
    runs = {"paged": toy_record(), "reserved": toy_record(reserve=2048)}
    table = policy_table(runs)
    assert table.index.tolist() == ["paged", "reserved"]
    assert table.columns.tolist() == list(VALIDATED_METRICS)
    for label, record in runs.items():
        summary = summarize(record)
        assert table.loc[label].tolist() == [float(getattr(summary, name)) for name in VALIDATED_METRICS]
    pd.testing.assert_frame_equal(table, policy_table({k: summarize(r) for k, r in runs.items()}))


def test_shown_values_are_scaled_rounded_and_never_nan() -> None:
    assert Shown("itl_p50_s", "ITL p50 (ms)", "lower", scale=1e3).text(0.01234) == "12.3"
    assert Shown("output_tokens_per_s", "tokens/s", "higher").text(12345.67) == "12,345.7"
    assert Shown("num_running_peak", "peak", "", digits=0).text(41.0) == "41"
    shown = as_shown(policy_table({"nothing": hand_record([], [], [])}))
    assert shown.columns.tolist() == [column.heading for column in POLICY_COLUMNS]
    assert shown.loc["nothing"].tolist() == ["–"] * 8 + ["0"]


def arriving(*ttft_ms: int) -> RunRecord:
    steps = [{"schedule_ns": 0, "commit_ns": t * MS, "num_decode_tokens": 1} for t in sorted(ttft_ms)]
    requests = [{"request": i, "num_output_tokens": 1} for i in range(len(ttft_ms))]
    return hand_record(steps, requests, [(i, i, 1) for i in range(len(ttft_ms))])


def test_ks_distance_by_hand() -> None:
    # Distribution functions of {1, 2, 3} and {2, 3, 4} are 1/3 apart on [1, 2), [2, 3) and [3, 4).
    distances = ks_distances(arriving(1, 2, 3), arriving(2, 3, 4))
    assert distances["ttft_ks"] == pytest.approx(1 / 3)
    assert math.isnan(distances["itl_ks"])
    assert ks_distances(arriving(1, 2, 3), arriving(3, 2, 1))["ttft_ks"] == 0
    assert ks_distances(arriving(1, 2), arriving(5, 6, 7))["ttft_ks"] == 1


def test_ks_distance_of_pooled_gaps_equals_a_scan() -> None:
    a, b = toy_record(base_ms=8), toy_record(base_ms=8.4)

    def gaps(record: RunRecord) -> np.ndarray:
        runs = record.emissions.to_pylist()
        commit, decodes = record.array("steps", "commit_ns"), record.array("steps", "num_decode_tokens") > 0
        times: dict[int, list[int]] = {}
        for run in sorted(runs, key=lambda run: run["first_step"]):
            later = (
                np.flatnonzero(decodes[run["first_step"] + 1 :])[: run["num_steps"] - 1]
                + run["first_step"]
                + 1
            )
            times.setdefault(run["request"], []).extend(commit[[run["first_step"], *later]].tolist())
        return np.concatenate([np.diff(of_one) for of_one in times.values()])

    left, right = gaps(a), gaps(b)
    at = np.concatenate((left, right))
    scan = max(abs(np.mean(left <= x) - np.mean(right <= x)) for x in np.unique(at))
    assert ks_distances(a, b)["itl_ks"] == pytest.approx(scan)
    assert 0 < scan < 1
