"""Piecewise linear tables that answer one question and a thousand at once with the same floats.

Both ways run the same additions and multiplications in the same order on IEEE doubles, element by element, so
a simulation that asks step by step and one that asks in bulk agree to the last bit. Beyond their ends tables
go on with the slope of their last segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


class Axis:
    """Increasing numbers, at least one, between which is interpolated."""

    __slots__ = ("_array", "_last", "first", "knots", "last")

    def __init__(self, knots: Sequence[int]) -> None:
        self.knots = list(knots)
        if not self.knots or any(b <= a for a, b in zip(self.knots, self.knots[1:], strict=False)):
            raise ValueError(f"an axis needs increasing numbers, not {self.knots}")
        self.first, self.last = self.knots[0], self.knots[-1]
        self._array = np.array(self.knots, dtype=np.float64)
        self._last = max(0, len(self.knots) - 2)

    def segment(self, x: float) -> tuple[int, int, float]:
        """The two knots around ``x`` and how far between them it lies: below 0 or above 1 beyond the ends."""
        left = min(max(bisect_right(self.knots, x) - 1, 0), self._last)
        right = min(left + 1, len(self.knots) - 1)
        if right == left:
            return left, left, 0.0
        start = float(self.knots[left])
        return left, right, (x - start) / (self.knots[right] - start)

    def segments(self, x: Values) -> tuple[Values, Values, Values]:
        """`segment` of every element."""
        left = np.clip(np.searchsorted(self._array, x, side="right") - 1, 0, self._last)
        right = np.minimum(left + 1, len(self.knots) - 1)
        start, end = self._array[left], self._array[right]
        width = np.where(right == left, 1.0, end - start)
        return left, right, np.where(right == left, 0.0, (x - start) / width)


class Line:
    """A function of one number through given points."""

    __slots__ = ("_array", "_values", "axis")

    def __init__(self, points: dict[int, float]) -> None:
        self.axis = Axis(sorted(points))
        self._values = [float(points[knot]) for knot in self.axis.knots]
        self._array = np.array(self._values)

    def at(self, x: float) -> float:
        """The value at ``x``."""
        left, right, share = self.axis.segment(x)
        return _between(self._values[left], self._values[right], share)

    def at_all(self, x: Values) -> Values:
        """`at` of every element."""
        left, right, share = self.axis.segments(x)
        return _between(self._array[left], self._array[right], share)


class Sheet:
    """A function of two numbers through the points of a full grid."""

    __slots__ = ("_array", "_values", "columns", "rows")

    def __init__(
        self, rows: Sequence[int], columns: Sequence[int], values: Sequence[Sequence[float]]
    ) -> None:
        self.rows, self.columns = Axis(rows), Axis(columns)
        self._values = [[float(value) for value in row] for row in values]
        self._array = np.array(self._values)
        if self._array.shape != (len(rows), len(columns)):
            raise ValueError(f"{self._array.shape} values for a grid of {len(rows)} x {len(columns)}")

    def at(self, x: float, y: float) -> float:
        """The value at row ``x``, column ``y``."""
        top, bottom, down = self.rows.segment(x)
        left, right, across = self.columns.segment(y)
        upper, lower = self._values[top], self._values[bottom]
        return _between(
            _between(upper[left], upper[right], across), _between(lower[left], lower[right], across), down
        )

    def at_all(self, x: Values, y: Values) -> Values:
        """`at` of every pair of elements."""
        top, bottom, down = self.rows.segments(x)
        left, right, across = self.columns.segments(y)
        upper = _between(self._array[top, left], self._array[top, right], across)
        lower = _between(self._array[bottom, left], self._array[bottom, right], across)
        return _between(upper, lower, down)


def _between(first: Any, second: Any, share: Any) -> Any:
    return first + (second - first) * share
