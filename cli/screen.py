"""What a person reads: lines, one table of runs side by side, a progress bar on a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pagedserve.metrics.compare import Shown
    from pagedserve.metrics.record import RunRecord
    from pagedserve.metrics.summary import Summary

PLAIN_WIDTH = 200
NUM_UPDATES = 200


class Screen:
    """Standard output for people; silent where it belongs to JSON."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._console = Console(quiet=is_quiet, highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            # A file or a pipe has no edge to wrap at.
            self._console.width = PLAIN_WIDTH

    def lines(self, lines: Iterable[str]) -> None:
        """Each on its own line, never wrapped."""
        for line in lines:
            self._console.print(line, soft_wrap=True)

    def table(self, summaries: Mapping[str, Summary]) -> None:
        """One column a run, one row a metric: throughput beside latency, memory and concurrency."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("")
        for label in summaries:
            table.add_column(label, justify="right", overflow="fold")
        for shown in shown_metrics(summaries.values()):
            values = [float(getattr(summary, shown.metric)) for summary in summaries.values()]
            table.add_row(shown.heading, *map(shown.text, values))
        self._console.print()
        self._console.print(table)
        self._console.print()

    def grid(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table of texts, the first column to the left."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print()
        self._console.print(table)
        self._console.print()

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], None] | None]:
        """A bar on standard error, for ``simulate``'s ``progress``; None where nobody watches."""
        console = Console(stderr=True)
        if not console.is_terminal:
            yield None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        # Drawn seldom: it shares the cores with what it watches.
        with Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, refresh_per_second=2
        ) as bar:
            task = bar.add_task(label, total=None)

            def advance(num_ended: int, num_requests: int) -> None:
                if num_ended % max(1, num_requests // NUM_UPDATES) == 0 or num_ended == num_requests:
                    bar.update(task, completed=num_ended, total=num_requests)

            yield advance


def shown_metrics(summaries: Iterable[Summary]) -> list[Shown]:
    """The rows of the table: those of ``metrics.compare``, then what tells of pressure and of goals."""
    from math import isnan

    from pagedserve.metrics.compare import POLICY_COLUMNS, Shown

    rows = [
        *POLICY_COLUMNS,
        Shown("num_preemptions", "preemptions", "lower", digits=0),
        Shown("num_recomputed_tokens", "recomputed tokens", "lower", digits=0),
        *_swap_rows(summaries),
        Shown("prefix_hit_rate", "prefix hits (% of prompts)", "higher", scale=100),
        Shown("requests_per_s", "requests/s", "higher", digits=2),
    ]
    if not all(isnan(summary.slo_attainment) for summary in summaries):
        rows.append(Shown("slo_attainment", "SLO kept (% of requests)", "higher", scale=100))
        rows.append(Shown("goodput_per_s", "goodput (requests/s)", "higher", digits=2))
    return rows


def _swap_rows(summaries: Iterable[Summary]) -> list[Shown]:
    """What was copied to host memory and back, if anything was."""
    from pagedserve.metrics.compare import Shown

    if not any(summary.num_blocks_swapped_out > 0 for summary in summaries):
        return []
    return [
        Shown("num_blocks_swapped_out", "blocks swapped out", "lower", digits=0),
        Shown("num_blocks_swapped_in", "blocks swapped in", "lower", digits=0),
        Shown("num_cpu_blocks_peak", "peak host blocks", "", digits=0),
    ]


def endings(label: str, record: RunRecord, summary: Summary) -> list[str]:
    """How the requests of a run ended, and why those that were refused were."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.finish_reasons.items())
    word = "failed" if record.is_client else "refused"
    why = [f"  {each['count']:,} {word}, such as: {each['example']}" for each in refusals(record)]
    return [f"{label}: {summary.num_requests:,} requests: {reasons}", *why]


def refusals(record: RunRecord) -> list[dict[str, Any]]:
    """Refused or failed requests by reason: messages that differ in numbers alone are one reason, with an example."""
    errors = [error for error in record.requests.column("error").to_pylist() if error is not None]
    kinds = [re.sub(r"\d+", "#", error) for error in errors]
    examples = dict(zip(reversed(kinds), reversed(errors), strict=True))
    return [{"count": count, "example": examples[kind]} for kind, count in Counter(kinds).most_common()]
