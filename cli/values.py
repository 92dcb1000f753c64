"""Parsers of option values, whose errors name the value and what would do.

``typer.Option(parser=...)`` takes them. Defaults pass through them too, hence ``Any``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from typer import BadParameter


def whole(low: int, high: int | None = None) -> Callable[[Any], int]:
    """Whole numbers from ``low`` to ``high``, both included; None: no upper bound."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse(text: Any) -> int:
        try:
            number = int(str(text))
        except ValueError:
            raise BadParameter(f"{str(text)!r} is not {wanted}") from None
        if number < low or (high is not None and number > high):
            raise BadParameter(f"{number} is not {wanted}")
        return number

    return parse


def real(
    low: float, *, above: bool = False, high: float = math.inf, infinite: bool = False
) -> Callable[[Any], float]:
    """Numbers from ``low`` (or ``above`` it) to ``high``; ``infinite``: inf is one of them."""
    wanted = f"a number {'above' if above else 'of at least'} {low:g}"
    if math.isfinite(high):
        wanted += f" and at most {high:,.10g}"
    elif infinite:
        wanted += " (inf is allowed)"

    def parse(text: Any) -> float:
        try:
            number = float(str(text))
        except ValueError:
            raise BadParameter(f"{str(text)!r} is not {wanted}") from None
        is_in = (low < number if above else low <= number) and number <= high
        if not is_in or (math.isinf(number) and not infinite):
            raise BadParameter(f"{number:g} is not {wanted}")
        return number

    return parse


def one_of(*choices: str) -> Callable[[Any], str]:
    """One of these words."""

    def parse(text: Any) -> str:
        if text not in choices:
            raise BadParameter(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse
