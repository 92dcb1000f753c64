"""From the columns a reader collected, in file order, to a checked trace in arrival order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pagedserve.traces.blocks import BlockIds, IntArray
from pagedserve.traces.report import MAX_EXAMPLES, Example, Tally, TraceError, TraceReport
from pagedserve.traces.rows import FieldError, RowsState
from pagedserve.traces.trace import Labels, Trace

BROKEN_CHAIN = (
    "has an id that follows another id than where it first occurred: an id must fix its whole prefix"
)
LATE = "rows that stood below a row of a later time were sorted up"
RESET_WINDOW = 20
"""A clock starts over where it falls back to within 1/20 of the span so far from where the file began."""


def assemble(rows: RowsState, name: str, report: TraceReport, rebases: bool, relative_clock: bool) -> Trace:
    """Check, sort stably and rebase the rows read; every row dropped or moved is counted in the report.

    Raises `TraceError` where a relative clock starts over, and for a broken chain of block ids unless
    ``rows.on_error`` is "drop".
    """
    arrivals = np.array(rows.arrival_ns, dtype=np.int64)
    if relative_clock:
        _refuse_reset(rows, arrivals)
    blocks = None
    keep = np.ones(len(arrivals), dtype=bool)
    if rows.block_size is not None:
        blocks = BlockIds(rows.block_size, np.array(rows.block_ids), np.array(rows.block_ends))
        keep[_broken_rows(rows, blocks)] = False
    order = np.argsort(arrivals, kind="stable")
    order = order[keep[order]]
    origin_ns = int(arrivals[order[0]]) if rebases and len(order) else 0
    tallies = tuple(tally for tally in (*rows.tallies(), _late_rows(rows, arrivals)) if tally.count)
    report = replace(report, num_rows_kept=len(order), origin_ns=origin_ns, tallies=tallies)
    return Trace(
        name=name,
        arrival_ns=arrivals[order] - origin_ns,
        num_prompt_tokens=np.array(rows.num_prompt_tokens, dtype=np.int64)[order],
        num_output_tokens=np.array(rows.num_output_tokens, dtype=np.int64)[order],
        row=np.array(rows.row, dtype=np.int64)[order],
        report=report,
        blocks=None if blocks is None else blocks.take(order),
        tenant=_labels(rows.labels.get("tenant"), order),
        session=_labels(rows.labels.get("session"), order),
        priority=None if rows.priority is None else np.array(rows.priority, dtype=np.int64)[order],
    )


def _labels(labels: Sequence[str] | None, order: IntArray) -> Labels | None:
    return None if labels is None else np.array(labels, dtype=object)[order]


def _late_rows(rows: RowsState, arrivals: IntArray) -> Tally:
    """Count the rows whose time is before that of some row above them."""
    highest = np.maximum.accumulate(arrivals)
    late = np.flatnonzero(arrivals < highest)
    examples = tuple(
        Example(
            rows.file, rows.row[i], rows.line[i], rows.arrival_field, f"{arrivals[i]} ns, below {highest[i]}"
        )
        for i in late[:MAX_EXAMPLES].tolist()
    )
    return Tally("reordered", LATE, len(late), examples)


def _broken_rows(rows: RowsState, blocks: BlockIds) -> IntArray:
    """Indices of rows whose block ids break the chain rule, after raising or counting each."""
    positions = blocks.broken_chains()
    request = np.searchsorted(blocks.offsets, positions, side="right") - 1
    broken, first = np.unique(request, return_index=True)
    for index, position in zip(broken.tolist(), positions[first].tolist(), strict=True):
        error = FieldError(rows.block_field, f"id {blocks.ids[position]}", BROKEN_CHAIN)
        rows.refuse(rows.line[index], rows.row[index], error)
    return broken


def _refuse_reset(rows: RowsState, arrivals: IntArray) -> None:
    """Raise where a clock that counts from the trace's start starts over: sorting would mix two traces.

    Told from disorder by three signs together: few rows fall behind their predecessor; one of them falls back
    to where the file began; and the rows after it stay behind what was reached before, not just one
    straggler.
    """
    num_rows = len(arrivals)
    descents = np.flatnonzero(arrivals[1:] < arrivals[:-1]) + 1
    if descents.size > num_rows / 10 + 1:
        return
    highest = np.maximum.accumulate(arrivals)
    for index in descents.tolist():
        reached, first = int(highest[index - 1]), int(arrivals[0])
        if abs(int(arrivals[index]) - first) * RESET_WINDOW > reached - first:
            continue
        caught_up = np.flatnonzero(arrivals[index:] >= reached)
        num_behind = int(caught_up[0]) if caught_up.size else num_rows - index
        if reached > first and num_behind >= max(2, num_rows // 100):
            raise TraceError(
                f"{rows.file} line {rows.line[index]}: {rows.arrival_field} falls from {reached} ns "
                f"back to {arrivals[index]} and stays below for {num_behind} rows: the clock starts over, so "
                "these are two traces in one file. Split the file there, or sort its rows if they are one"
            )
