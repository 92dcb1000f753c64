"""A run in numbers: pure functions of its record, the same for an engine and for a simulator."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagedserve.metrics.record import RecordError, RunRecord
from pagedserve.metrics.record_tables import FINISH_REASONS
from pagedserve.metrics.timeline import step_timeline
from pagedserve.metrics.tokens import (
    NS_PER_S,
    RequestTimes,
    TokenTimes,
    inter_token_s,
    request_times,
    token_times,
)

MEMORY_AND_LOAD = (
    "kv_occupancy_mean",
    "kv_occupancy_peak",
    "waste_mean",
    "num_running_mean",
    "num_running_peak",
    "num_waiting_mean",
    "num_waiting_peak",
)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective: upper bounds in seconds; None asks nothing. At least one is given."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        given = [bound for bound in (self.ttft_s, self.tpot_s, self.e2e_s) if bound is not None]
        if not given or not all(bound > 0 for bound in given):
            raise ValueError(f"{self}: expected at least one bound, each above 0 s")


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of one run. NaN: there was nothing to measure (``as_dict`` says None).

    In a client's record all that happens inside the server is NaN: steps, memory, load, preemptions.

    Throughput counts over ``duration_s``: first arrival to last token. Output tokens are all that were
    emitted, also those of requests cut short later; total tokens add the prompts of requests that emitted
    any; requests are those that finished ("stop" or "length").

    Latencies (seconds, percentiles linear) follow ``metrics.tokens``. ``ttft``: every request that emitted
    a token; ``itl``: every gap of every request, pooled, so long replies weigh more, which is why
    ``itl_request_max`` gives each request one voice, its longest gap; ``tpot``: finished requests of two
    tokens or more; ``e2e``: finished requests; ``queue_time``: every request that was ever scheduled.

    Means over time are weighted by time from the first schedule to the last commit, by the rule of
    ``metrics.timeline.step_timeline``; idle time counts as zero. ``kv_occupancy``: blocks referenced by
    requests / blocks in the pool, cached ones excluded; NaN for a pool without limit. ``waste_mean``:
    wasted slot-time / allocated slot-time, so only while blocks are allocated. ``recomputed_share``: of all
    tokens computed. ``num_blocks_swapped_out`` and ``_in``: copied to and from host memory, of which
    at most ``num_cpu_blocks_peak`` were used behind a step's copies. ``prefix_hit_rate``: hit tokens / prompt
    tokens of requests that were ever scheduled.

    ``slo_attainment``: share of all requests, those refused or aborted included, that finished within the
    bounds; ``goodput_per_s``: their number / ``duration_s``. A reply of one token has no TPOT to miss.
    """

    # Those counts that a client does not see are whole numbers or NaN.
    num_requests: int
    num_finished: int
    finish_reasons: dict[str, int]
    num_steps: float
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    itl_mean_s: float
    itl_p50_s: float
    itl_p90_s: float
    itl_p99_s: float
    itl_max_s: float
    itl_request_max_mean_s: float
    itl_request_max_p50_s: float
    itl_request_max_p90_s: float
    itl_request_max_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    tpot_max_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    e2e_max_s: float
    queue_time_mean_s: float
    queue_time_p50_s: float
    queue_time_p90_s: float
    queue_time_p99_s: float
    queue_time_max_s: float
    kv_occupancy_mean: float
    kv_occupancy_peak: float
    waste_mean: float
    num_running_mean: float
    num_running_peak: float
    num_waiting_mean: float
    num_waiting_peak: float
    num_preemptions: float
    num_recomputed_tokens: float
    recomputed_share: float
    num_blocks_swapped_out: float
    num_blocks_swapped_in: float
    num_cpu_blocks_peak: float
    num_discarded_tokens: float
    prefix_hit_rate: float
    slo_attainment: float
    goodput_per_s: float

    def as_dict(self) -> dict[str, Any]:
        """Metric name to value, ready for JSON: a NaN becomes None."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def summarize(record: RunRecord, slo: Slo | None = None) -> Summary:
    """All metrics of a run; without ``slo`` its attainment and goodput are NaN.

    Raises ``RecordError`` for a record that contradicts itself (unknown steps, times that run backwards).
    """
    tokens = token_times(record)
    times = request_times(record, tokens)
    return Summary(
        **_throughput(record, tokens, times, slo),
        **_spread("ttft", times.ttft_s),
        **_spread("itl", inter_token_s(tokens)),
        **_spread("itl_request_max", times.itl_max_s, ("mean", "p50", "p90", "p99")),
        **_spread("tpot", times.tpot_s),
        **_spread("e2e", times.e2e_s),
        **_spread("queue_time", times.queue_time_s),
        **_memory_and_load(record),
        **_work(record),
    )


def block_size(record: RunRecord) -> float:
    """Token slots per block, from the header's limits; NaN for a client, who does not see them.

    Raises ``RecordError`` where it is missing.
    """
    if record.is_client:
        return math.nan
    size = record.header["limits"].get("block_size")
    if not isinstance(size, int) or size < 1:
        raise RecordError(f"header: limits.block_size: expected an integer of at least 1, found {size!r}")
    return size


def num_blocks(record: RunRecord) -> int | None:
    """Blocks in the pool, from the header's limits; None: it had no limit, or a client does not see it."""
    number = record.header["limits"].get("num_blocks")
    if number is not None and (not isinstance(number, int) or number < 1):
        raise RecordError(f"header: limits.num_blocks: expected null or at least 1, found {number!r}")
    return number


def meets(slo: Slo, times: RequestTimes) -> np.ndarray:
    """Per request row: whether it finished and kept every bound of ``slo``."""
    good = times.finished & ~np.isnan(times.ttft_s)
    for bound, values in ((slo.ttft_s, times.ttft_s), (slo.e2e_s, times.e2e_s), (slo.tpot_s, times.tpot_s)):
        if bound is not None:  # NaN, the TPOT of a single token, is not above any bound
            good &= ~(values > bound)
    return good


def _throughput(
    record: RunRecord, tokens: TokenTimes, times: RequestTimes, slo: Slo | None
) -> dict[str, Any]:
    arrival = record.array("requests", "arrival_ns")
    prompt = record.array("requests", "num_prompt_tokens")
    num_output = tokens.time_ns.size
    duration = float(tokens.time_ns.max() - arrival.min()) / NS_PER_S if num_output else 0.0
    num_finished = int(times.finished.sum())
    num_good = math.nan if slo is None else int(meets(slo, times).sum())
    reasons = Counter(record.requests.column("finish_reason").to_pylist())
    return {
        "num_requests": arrival.size,
        "num_finished": num_finished,
        "finish_reasons": {reason: reasons[reason] for reason in FINISH_REASONS if reasons[reason]},
        "num_steps": math.nan if record.is_client else record.steps.num_rows,
        "num_prompt_tokens": int(prompt.sum()),
        "num_output_tokens": num_output,
        "duration_s": duration,
        "output_tokens_per_s": _ratio(num_output, duration),
        "total_tokens_per_s": _ratio(num_output + int(prompt[tokens.counts > 0].sum()), duration),
        "requests_per_s": _ratio(num_finished, duration),
        "slo_attainment": _ratio(num_good, arrival.size),
        "goodput_per_s": _ratio(num_good, duration),
    }


def _memory_and_load(record: RunRecord) -> dict[str, Any]:
    if record.is_client:
        return dict.fromkeys(MEMORY_AND_LOAD, math.nan)
    timeline = step_timeline(record)
    used, running, waiting = (
        record.array("steps", name) for name in ("num_blocks_used", "num_running", "num_waiting")
    )
    pool = num_blocks(record) or math.nan
    slots = timeline.integral(used) * block_size(record) if used.size else 0.0
    return {
        "kv_occupancy_mean": timeline.mean(used) / pool,
        "kv_occupancy_peak": float(used.max()) / pool if used.size else math.nan,
        "waste_mean": _ratio(timeline.integral(record.array("steps", "num_wasted_slots")), slots),
        "num_running_mean": timeline.mean(running),
        "num_running_peak": int(running.max(initial=0)),
        "num_waiting_mean": timeline.mean(waiting),
        "num_waiting_peak": int(waiting.max(initial=0)),
    }


def _work(record: RunRecord) -> dict[str, Any]:
    def total(name: str) -> float:
        if record.is_client:
            return math.nan
        return int(record.array("steps", name).sum(dtype=np.int64))

    # A client knows the hits of those requests for which the server stated them.
    column = "num_prefix_hit_tokens" if record.is_client else "first_schedule_ns"
    _, counted = record.nullable_array("requests", column)
    hits = record.nullable_array("requests", "num_prefix_hit_tokens")[0][counted].sum()
    prompts = record.array("requests", "num_prompt_tokens")[counted].sum()
    computed = total("num_prefill_tokens") + total("num_decode_tokens")
    return {
        "num_preemptions": total("num_preemptions"),
        "num_recomputed_tokens": total("num_recomputed_tokens"),
        "recomputed_share": _ratio(total("num_recomputed_tokens"), computed),
        "num_blocks_swapped_out": total("num_blocks_swapped_out"),
        "num_blocks_swapped_in": total("num_blocks_swapped_in"),
        "num_cpu_blocks_peak": math.nan
        if record.is_client
        else int(record.array("steps", "num_cpu_blocks_used").max(initial=0)),
        "num_discarded_tokens": total("num_discarded_tokens"),
        "prefix_hit_rate": _ratio(int(hits), int(prompts)),
    }


def _spread(
    name: str, values_s: np.ndarray, parts: tuple[str, ...] = ("mean", "p50", "p90", "p99", "max")
) -> dict[str, float]:
    present = values_s[~np.isnan(values_s)]
    if not present.size:
        return {f"{name}_{part}_s": math.nan for part in parts}
    p50, p90, p99 = np.percentile(present, (50, 90, 99))
    found = {"mean": present.mean(), "p50": p50, "p90": p90, "p99": p99, "max": present.max()}
    return {f"{name}_{part}_s": float(found[part]) for part in parts}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
