"""What the live page's charts draw: rates and percentiles over the last seconds, a point for every look."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedserve.engine.server.engine_view import EngineView
from pagedserve.engine.server.histograms import RecentState

RATE_WINDOW_S = 3.0
ITL_WINDOW_S = 5.0
TTFT_WINDOW_S = 10.0
"""Requests come more seldom than tokens."""
HISTORY_S = 180.0
Values = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class _Look:
    """What came since the look before, and the totals then."""

    at_s: float
    itl: Values
    ttft: Values
    totals: dict[str, float]


class PulseState:
    """Takes looks in their order; ``history`` has the points of the last `HISTORY_S`.

    The first look after a pause starts anew: nothing is said of times in which nobody looked.
    """

    def __init__(self) -> None:
        self.history: deque[dict[str, Any]] = deque()
        self._looks: deque[_Look] = deque()
        self._num_itl = self._num_ttft = 0

    def pause(self) -> None:
        """Nobody looks any more."""
        self._looks.clear()

    def add(self, view: EngineView, at_s: float, block_size: int, ttft: RecentState) -> dict[str, Any]:
        """The point of a look at ``at_s``. Latencies in seconds, as [p50, p95]; None where nothing happened."""
        looks = self._looks
        new_itl = view.itl[max(0, len(view.itl) - (view.num_itl - self._num_itl)) :] if looks else []
        new_ttft = ttft.since(self._num_ttft) if looks else []
        self._num_itl, self._num_ttft = view.num_itl, ttft.num_observed
        looks.append(_Look(at_s, new_itl, new_ttft, view.totals))
        while looks[0].at_s < at_s - max(RATE_WINDOW_S, ITL_WINDOW_S, TTFT_WINDOW_S):
            looks.popleft()
        pool = view.pool
        used, size = pool.owned + pool.quarantined, len(view.blocks)
        point = {
            "t": round(at_s, 3),
            "ttft": _percentiles([v for look in self._last(TTFT_WINDOW_S) for v in look.ttft]),
            "itl": _percentiles([v for look in self._last(ITL_WINDOW_S) for v in look.itl]),
            **self._rates(),
            "used": round(used / size, 4),
            "cached": round(pool.cached / size, 4),
            "waste": round(view.num_wasted_slots / (used * block_size), 4) if used else None,
            "running": len(view.running),
            "waiting": view.num_waiting,
        }
        self.history.append(point)
        while self.history[0]["t"] < at_s - HISTORY_S:
            self.history.popleft()
        return point

    def _last(self, window_s: float) -> list[_Look]:
        newest = self._looks[-1].at_s
        return [look for look in self._looks if look.at_s >= newest - window_s]

    def _rates(self) -> dict[str, float | None]:
        first, last = self._last(RATE_WINDOW_S)[0], self._looks[-1]
        span_s = last.at_s - first.at_s
        if span_s <= 0:
            return {"tps": None, "gap": None, "gap_s": None}
        told = {name: last.totals[name] - first.totals[name] for name in last.totals}
        at_work_s = told["gap_s"] + told["busy_s"]
        return {
            "tps": round(told["output_tokens"] / span_s, 2),
            "gap": round(told["gap_s"] / at_work_s, 4) if at_work_s else None,
            "gap_s": round(told["gap_s"] / told["gaps"], 7) if told["gaps"] else None,
        }


def _percentiles(values: Sequence[tuple[float, int]]) -> list[float] | None:
    """p50 and p95 of values that were each seen several times: the least that so many do not exceed."""
    if not values:
        return None
    ordered = np.array(sorted(values))
    reached = np.cumsum(ordered[:, 1])
    places = np.searchsorted(reached, np.array([0.5, 0.95]) * reached[-1])
    return [round(float(value), 6) for value in ordered[places, 0]]
