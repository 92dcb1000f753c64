"""Runs side by side: a simulation against the live run it predicts, and one policy against another.

Throughput is never shown alone: every table here has latency, memory and concurrency beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import Summary, summarize
from pagedserve.metrics.tokens import inter_token_s, request_times, token_times


@dataclass(frozen=True, slots=True)
class Shown:
    """How a metric is shown: ``value * scale`` with ``digits`` decimals under ``heading``, ``unit`` included.

    ``better`` is which end is better: "higher", "lower", or "" where neither is.
    """

    metric: str
    heading: str
    better: str
    scale: float = 1.0
    digits: int = 1

    def text(self, value: float) -> str:
        """The value as shown; "–" where there was nothing to measure."""
        return "–" if np.isnan(value) else f"{value * self.scale:,.{self.digits}f}"


POLICY_COLUMNS: tuple[Shown, ...] = (
    Shown("output_tokens_per_s", "output tokens/s", "higher"),
    Shown("ttft_p50_s", "TTFT p50 (s)", "lower", digits=3),
    Shown("ttft_p90_s", "TTFT p90 (s)", "lower", digits=3),
    Shown("itl_p50_s", "ITL p50 (ms)", "lower", scale=1e3),
    Shown("itl_p90_s", "ITL p90 (ms)", "lower", scale=1e3),
    Shown("e2e_p50_s", "latency p50 (s)", "lower", digits=2),
    Shown("kv_occupancy_mean", "KV occupancy (%)", "", scale=100),
    Shown("waste_mean", "KV waste (%)", "lower", scale=100),
    Shown("num_running_peak", "peak running", "", digits=0),
)
VALIDATED_METRICS: tuple[str, ...] = tuple(shown.metric for shown in POLICY_COLUMNS)


def compare(
    live: RunRecord | Summary,
    simulated: RunRecord | Summary,
    metrics: Sequence[str] = VALIDATED_METRICS,
) -> pd.DataFrame:
    """One row a metric, columns ``live``, ``simulated``, ``error_pct``; all float, NaN where not measured."""
    left, right = _summary(live), _summary(simulated)
    rows = [(float(getattr(left, name)), float(getattr(right, name))) for name in metrics]
    return pd.DataFrame(
        [(a, b, error_pct(a, b)) for a, b in rows],
        index=pd.Index(metrics, name="metric"),
        columns=pd.Index(["live", "simulated", "error_pct"]),
    )


def error_pct(live: float, simulated: float) -> float:
    """``100 * (simulated - live) / live``, signed: above 0 the simulation said too much.

    0 where both are 0; NaN where only ``live`` is, or one was not measured: no percentage says that.
    """
    if live == 0:
        return 0.0 if simulated == 0 else float("nan")
    return 100 * (simulated - live) / live


def policy_table(runs: Mapping[str, RunRecord | Summary]) -> pd.DataFrame:
    """One row a run, in the order given; columns are the metrics of ``POLICY_COLUMNS``, unscaled floats."""
    summaries = {label: _summary(run) for label, run in runs.items()}
    return pd.DataFrame(
        [[float(getattr(summary, name)) for name in VALIDATED_METRICS] for summary in summaries.values()],
        index=pd.Index(list(summaries), name="policy"),
        columns=pd.Index(VALIDATED_METRICS),
    )


def as_shown(table: pd.DataFrame) -> pd.DataFrame:
    """``policy_table`` as text for a reader: the headings of ``POLICY_COLUMNS``, scaled and rounded."""
    return pd.DataFrame(
        {shown.heading: [shown.text(value) for value in table[shown.metric]] for shown in POLICY_COLUMNS},
        index=table.index,
    )


def ks_distances(a: RunRecord, b: RunRecord) -> dict[str, float]:
    """Kolmogorov-Smirnov distance of the TTFT and of the pooled ITL distributions of two runs.

    The largest vertical distance between the two empirical distribution functions, 0 (equal) to 1
    (disjoint); NaN where one run has none. Keys: ``ttft_ks``, ``itl_ks``.
    """
    (ttft_a, itl_a), (ttft_b, itl_b) = _latencies(a), _latencies(b)
    return {"ttft_ks": _ks(ttft_a, ttft_b), "itl_ks": _ks(itl_a, itl_b)}


def _summary(run: RunRecord | Summary) -> Summary:
    return run if isinstance(run, Summary) else summarize(run)


def _latencies(record: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    tokens = token_times(record)
    ttft = request_times(record, tokens).ttft_s
    return ttft[~np.isnan(ttft)], inter_token_s(tokens)


def _ks(a: np.ndarray, b: np.ndarray) -> float:
    from scipy.stats import ks_2samp  # takes most of a second to import, and only validation asks

    if not a.size or not b.size:
        return float("nan")
    # The distance is the same with either method; the exact p-value, not used, would cost minutes.
    result: Any = ks_2samp(a, b, method="asymp")
    return float(result.statistic)
