"""Distributions of prompt and output lengths for synthetic traces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagedserve.traces.blocks import IntArray, frozen_ints
from pagedserve.traces.report import TraceError
from pagedserve.traces.trace import MAX_TOKENS_PER_ROW, Trace


class LengthDist(Protocol):
    """Draws lengths in tokens, each at least 1."""

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """``size`` independent lengths, int64."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        _check_range(self.tokens, self.tokens)

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """``size`` times the length."""
        return np.full(size, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole length from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """``size`` independent lengths."""
        return rng.integers(self.low, self.high, size=size, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal), rounded to whole tokens and clipped to ``minimum..maximum``.

    State the centre by ``median`` or ``mean`` and the spread by ``sigma`` (of the logarithm) or ``cv``
    (standard deviation / mean), one of each. They describe the distribution before clipping, which moves its
    mean a little: mean = median * exp(sigma**2 / 2), cv = sqrt(exp(sigma**2) - 1).
    """

    median: float | None = None
    mean: float | None = None
    sigma: float | None = None
    cv: float | None = None
    minimum: int = 1
    maximum: int = MAX_TOKENS_PER_ROW

    def __post_init__(self) -> None:
        _check_range(self.minimum, self.maximum)
        for pair in (("median", "mean"), ("sigma", "cv")):
            given = [name for name in pair if getattr(self, name) is not None]
            if len(given) != 1:
                raise TraceError(
                    f"a log-normal length needs one of {pair[0]} and {pair[1]}, but has {given or 'none'}"
                )
            value = getattr(self, given[0])
            # No spread at all is a fair wish; a centre of 0 tokens is not.
            if not math.isfinite(value) or value < 0 or (value == 0 and pair[0] == "median"):
                raise TraceError(
                    f"{given[0]} of a log-normal length must be positive and finite, not {value}"
                )

    def parameters(self) -> tuple[float, float]:
        """Mean and standard deviation of the length's natural logarithm."""
        sigma = self.sigma if self.sigma is not None else math.sqrt(math.log1p((self.cv or 0.0) ** 2))
        if self.median is not None:
            return math.log(self.median), sigma
        assert self.mean is not None
        return math.log(self.mean) - sigma**2 / 2, sigma

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """``size`` independent lengths."""
        mu, sigma = self.parameters()
        drawn = np.rint(rng.lognormal(mu, sigma, size))
        return np.clip(drawn, self.minimum, self.maximum).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Empirical:
    """Lengths drawn with replacement from given ones, such as one column of a trace."""

    lengths: IntArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", frozen_ints("lengths", self.lengths))
        if not len(self.lengths):
            raise TraceError("an empirical length distribution needs at least one length")
        _check_range(int(self.lengths.min()), int(self.lengths.max()))

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """``size`` independent draws."""
        return self.lengths[rng.integers(len(self.lengths), size=size)]


@dataclass(frozen=True, slots=True, eq=False)
class TraceLengths:
    """Prompt and output lengths drawn together: both from one request of a trace, with replacement.

    Keeps how they depend on each other, which two `Empirical` distributions lose.
    """

    trace: Trace

    def __post_init__(self) -> None:
        if not len(self.trace):
            raise TraceError(f"trace {self.trace.name!r} is empty: there are no lengths to draw from")

    def sample_pairs(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        """``size`` independent pairs, prompts and outputs."""
        index = rng.integers(len(self.trace), size=size)
        return self.trace.num_prompt_tokens[index], self.trace.num_output_tokens[index]


def _check_range(low: int, high: int) -> None:
    if not 1 <= low <= high <= MAX_TOKENS_PER_ROW:
        raise TraceError(
            f"lengths must run from at least 1 to at most {MAX_TOKENS_PER_ROW}, not from {low} to {high}"
        )
