"""What happened to the rows of a trace on the way from its source: the report every trace carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Kind = Literal["dropped", "clipped", "reordered", "changed"]

MAX_EXAMPLES = 3
"""Examples kept for each reason; the count is always complete."""


class TraceError(ValueError):
    """A trace cannot be read, built or changed as asked; the message names the place and the value."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row that a tally counts.

    ``row`` is the data row in the source, counted from 1. ``line`` is the line in the file, counted from 1,
    header included; it is None where a transform, which sees no file, did the counting.
    """

    file: str
    row: int
    line: int | None
    field: str
    value: str

    def __str__(self) -> str:
        place = f"row {self.row}" if self.line is None else f"line {self.line}"
        return f"{self.file} {place}: {self.field} = {self.value}"


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rows were dropped, clipped, reordered or changed for one reason, with the first examples."""

    kind: Kind
    reason: str
    count: int
    examples: tuple[Example, ...] = ()

    def __str__(self) -> str:
        shown = f"; first: {', '.join(map(str, self.examples))}" if self.examples else ""
        return f"{self.count} {self.kind}: {self.reason}{shown}"


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The history of a trace: where it came from, and what reading and every transform did to its rows.

    ``num_rows_read`` counts the data rows of the source; ``num_rows_kept`` those in the trace now.
    ``origin_ns`` is the time in the source's own clock that became 0 (nanoseconds since the Unix epoch for
    formats with dates). ``steps`` names what made and changed the trace, in order; ``notes`` are remarks that
    count no rows, such as ignored columns.
    """

    file: str
    format: str
    num_rows_read: int
    num_rows_kept: int
    detected: bool = False
    origin_ns: int = 0
    steps: tuple[str, ...] = ()
    tallies: tuple[Tally, ...] = ()
    notes: tuple[str, ...] = ()

    def extended(self, step: str, num_rows_kept: int, tallies: Iterable[Tally] = ()) -> TraceReport:
        """The report after one more transform; tallies that count nothing are left out."""
        counted = tuple(tally for tally in tallies if tally.count)
        return replace(
            self,
            num_rows_kept=num_rows_kept,
            steps=(*self.steps, step),
            tallies=self.tallies + counted,
        )

    def count(self, kind: Kind) -> int:
        """Rows counted under a kind, over all reasons. A row clipped twice counts twice."""
        return sum(tally.count for tally in self.tallies if tally.kind == kind)

    def lines(self) -> list[str]:
        """The report as lines for a screen."""
        how = " (detected)" if self.detected else ""
        rows = f"{self.num_rows_read} rows read, {self.num_rows_kept} kept"
        return [
            f"{self.file}: format {self.format}{how}, {rows}",
            *self.steps,
            *map(str, self.tallies),
            *self.notes,
        ]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)
