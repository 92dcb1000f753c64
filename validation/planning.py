"""Which traffic to replay: how long, how dense, found by simulation before anything runs live."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import summarize
from pagedserve.policy import Limits, Policy
from pagedserve.simulator.cost import CostModel
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.trace import Trace
from pagedserve.traces.transforms import scale_lengths, with_rate
from pagedserve.validation.runnable import check_runnable

RUN_S = 60.0
"""How long a fitted run lasts, about."""
FIT_STEPS = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy runs within, live and simulated."""

    policy: Policy
    limits: Limits
    overlap_depth: int = 0
    max_tokens: int | None = None
    """The limit that every request declares; None: the longest output of the trace."""

    def simulated(self, trace: Trace, cost: CostModel) -> RunRecord:
        """The record of ``trace`` simulated in this setting."""
        return simulate(
            trace,
            self.policy,
            cost,
            self.limits,
            overlap_depth=self.overlap_depth,
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace ready to be replayed, and how it came about.

    ``capacity_rps``: requests/s that the simulation serves when all are there at once. ``rate`` is the mean
    arrival rate in requests/s (``math.inf``: all at once), ``load`` its share of the capacity.
    """

    trace: Trace
    length_scale: float
    capacity_rps: float
    rate: float
    load: float

    def as_dict(self) -> dict[str, object]:
        """JSON values; an infinite rate or load is None."""
        return {
            "trace": self.trace.name,
            "trace_sha256": self.trace.sha256(),
            "num_requests": len(self.trace),
            "length_scale": self.length_scale,
            "capacity_requests_per_s": self.capacity_rps,
            "rate_requests_per_s": self.rate if math.isfinite(self.rate) else None,
            "load": self.load if math.isfinite(self.load) else None,
        }


def capacity_rps(trace: Trace, setting: Setting, cost: CostModel) -> float:
    """Requests/s of a simulation in which all requests wait from the start: about the most that any get."""
    record = setting.simulated(at_once(trace), cost)
    duration_s = summarize(record).duration_s
    return len(trace) / duration_s


def at_once(trace: Trace) -> Trace:
    """The trace with every request arriving at 0, in its order."""
    return replace(trace, arrival_ns=0 * trace.arrival_ns)


def at_rate(trace: Trace, rate: float) -> Trace:
    """The trace's own arrival pattern, at a mean of ``rate`` requests/s; ``math.inf``: all at once."""
    return at_once(trace) if math.isinf(rate) else with_rate(trace, rate)


def plan_traffic(
    trace: Trace,
    setting: Setting,
    cost: CostModel,
    *,
    rate: float | None = None,
    load: float = 0.7,
    length_scale: float | None = None,
    fit: bool = False,
    run_s: float = RUN_S,
) -> Traffic:
    """Scale lengths once, then arrivals, to a ``rate`` in requests/s or to a ``load`` of the capacity.

    ``fit`` finds the largest length scale, 1 at most, with which the largest request fits the model and the
    run lasts about ``run_s`` seconds. Raises ValueError for a load or rate that is not above 0, if both a
    length scale and ``fit`` are asked for, and as `check_runnable` does.
    """
    _check_asked(trace, rate, load, length_scale, fit)
    has_span = trace.describe().rate_per_s is not None

    def planned(scale: float) -> Traffic:
        scaled = trace if scale == 1.0 else scale_lengths(trace, scale)
        check_runnable(scaled, setting.limits, setting.max_tokens)
        capacity = capacity_rps(scaled, setting, cost)
        # Requests of one instant have no rate to scale; asked for one, `with_rate` says so.
        wanted = rate if rate is not None else load * capacity if has_span else math.inf
        return Traffic(at_rate(scaled, wanted), scale, capacity, wanted, wanted / capacity)

    if not fit:
        return planned(length_scale or 1.0)
    if rate is not None and len(trace) / rate > run_s:
        raise ValueError(
            f"{len(trace)} requests at {rate:g}/s take {len(trace) / rate:,.0f} s, and {run_s:g} s were aimed at: "
            "take fewer requests, raise the rate, or give a length scale"
        )
    return _fitted(trace, setting.limits, planned, run_s)


def _check_asked(
    trace: Trace, rate: float | None, load: float, length_scale: float | None, fit: bool
) -> None:
    for name, value in (("rate", rate), ("load", load), ("length_scale", length_scale)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    if fit and length_scale is not None:
        raise ValueError(f"both length_scale {length_scale} and fit are given; give one of them")
    if not len(trace):
        raise ValueError("the trace is empty: there is nothing to replay")


def _fitted(trace: Trace, limits: Limits, planned: Callable[[float], Traffic], run_s: float) -> Traffic:
    """The traffic of the largest length scale that fits model and time, found by bisection."""
    total = int((trace.num_prompt_tokens + trace.num_output_tokens).max())
    room = min(limits.max_model_len, limits.num_slots)
    largest = usable_scale(trace, min(1.0, (room - 2) / total), limits.block_size)
    traffic = planned(largest)
    if _duration_s(traffic) <= run_s:
        return traffic
    low, high, fitting = largest / 1000, largest, None
    for _ in range(FIT_STEPS):
        middle = math.sqrt(low * high)
        tried = planned(usable_scale(trace, middle, limits.block_size))
        if _duration_s(tried) <= run_s:
            low, fitting = middle, tried
        else:
            high, traffic = middle, tried
    if fitting is None:
        raise ValueError(
            f"{len(trace)} requests take {_duration_s(traffic):,.0f} s even with lengths x "
            f"{traffic.length_scale:.2g}, and {run_s:,.0f} s were aimed at: take fewer requests or give a scale"
        )
    return fitting


def usable_scale(trace: Trace, scale: float, block_size: int) -> float:
    """The largest length scale up to ``scale`` that the trace's blocks allow; three digits where all are.

    Block ids stand for whole blocks of a token at least, and the engine's must divide them or be divided by them.
    """
    if trace.blocks is None:
        return scale if scale == 1.0 else max(math.floor(scale * 1000) / 1000, scale / 2)
    size = max(1, math.floor(trace.blocks.block_size * scale))
    while size % block_size and block_size % size:
        size -= 1
    return size / trace.blocks.block_size


def _duration_s(traffic: Traffic) -> float:
    """How long a run of this traffic takes: to send it, or to serve it, whichever is longer."""
    return len(traffic.trace) / min(traffic.rate, traffic.capacity_rps)
