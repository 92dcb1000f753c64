"""Histograms cheap enough for an engine's thread: a list of counts, no lock, one writer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

_FINE_S = (0.001, 0.0025, 0.005)
TTFT_S = (
    *_FINE_S,
    *(0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_S = (
    *_FINE_S,
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
PHASE_S = (
    *_FINE_S,
    *(0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
"""Seconds. vLLM's buckets, and finer ones: with small models on fast devices everything happens below them."""
GAP_S = (
    *(0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10),
)
"""Seconds between two steps of a device: a host that keeps up is in the first few."""
ITERATION_TOKENS = (1, *(1 << power for power in range(3, 15)))
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)


KEPT_VALUES = 2048


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to ``most``."""
    steps = [mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5)]
    return tuple(step for step in steps if step <= most)


class HistogramState:
    """Counts of values by bucket. One thread observes; any may read, a moment late."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper ends, included, rising; a last bucket without end follows by itself."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, perhaps several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """For every bound, and infinity, the number of values up to it."""
        return list(zip((*self.bounds, math.inf), accumulate(self.counts), strict=True))


class RecentState:
    """The last values observed, exactly, for whoever looks now and then; one thread observes."""

    __slots__ = ("num_observed", "values")

    def __init__(self) -> None:
        self.values: deque[tuple[float, int]] = deque(maxlen=KEPT_VALUES)
        self.num_observed = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Keep ``value``, seen so many times, until newer ones push it out."""
        self.values.append((value, times))
        self.num_observed += 1

    def since(self, num_observed: int) -> list[tuple[float, int]]:
        """What came after the first ``num_observed``, as far as it is kept. Not while another thread observes."""
        kept = list(self.values)
        return kept[max(0, len(kept) - (self.num_observed - num_observed)) :]
