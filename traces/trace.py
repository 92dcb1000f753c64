"""The one internal record of a request trace: columns of equal length, checked once, never changed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedserve.traces.blocks import BlockIds, IntArray, frozen_ints
from pagedserve.traces.report import Tally, TraceError, TraceReport
from pagedserve.traces.summary import TraceSummary, summarise

MAX_TOKENS_PER_ROW = 2**31 - 1
"""Largest prompt or output a trace may hold, so that sums over any trace fit int64."""

Labels = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in arrival order, one column an array of length N; all arrays are read-only.

    ``arrival_ns`` is int64, at least 0 and non-decreasing; requests of one instant keep the source's order.
    ``num_prompt_tokens`` and ``num_output_tokens`` are int64 from 1 to 2**31 - 1. ``row`` is each request's
    data row in the source, counted from 1. ``blocks`` are ids that say which prompts share a prefix (see
    `BlockIds`). ``tenant`` and ``session`` are strings on one line, ``priority`` int64 (lower first). Build
    one with `of`.

    Raises `TraceError` naming the first row that breaks a rule.
    """

    name: str
    arrival_ns: IntArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    row: IntArray
    report: TraceReport
    blocks: BlockIds | None = None
    tenant: Labels | None = None
    session: Labels | None = None
    priority: IntArray | None = None

    @classmethod
    def of(
        cls,
        name: str,
        arrival_ns: npt.ArrayLike,
        num_prompt_tokens: npt.ArrayLike,
        num_output_tokens: npt.ArrayLike,
        **optional: Any,
    ) -> Trace:
        """A trace from anything numpy reads as integers; ``optional`` are the other fields.

        ``row`` defaults to 1..N, ``report`` to one that says the rows were given in memory. Raises
        `TraceError` also where an id in ``blocks`` follows different ids in different prompts.
        """
        arrivals = frozen_ints("arrival_ns", arrival_ns)
        num_rows = len(arrivals)
        optional.setdefault("row", np.arange(1, num_rows + 1))
        optional.setdefault("report", TraceReport(name, "memory", num_rows, num_rows))
        prompts = frozen_ints("num_prompt_tokens", num_prompt_tokens)
        outputs = frozen_ints("num_output_tokens", num_output_tokens)
        trace = cls(name, arrivals, prompts, outputs, **optional)
        if trace.blocks is not None and (broken := trace.blocks.broken_chains()).size:
            broken_id = trace.blocks.ids[broken[0]]
            raise TraceError(f"block id {broken_id} follows different ids: an id must fix its whole prefix")
        return trace

    def __post_init__(self) -> None:
        for column in ("arrival_ns", "num_prompt_tokens", "num_output_tokens", "row", "priority"):
            values = getattr(self, column)
            if values is not None:
                object.__setattr__(self, column, frozen_ints(column, values))
        for column in ("tenant", "session"):
            values = getattr(self, column)
            if values is not None:
                object.__setattr__(self, column, _frozen_labels(column, values))
        for column in ("num_prompt_tokens", "num_output_tokens", "row", "tenant", "session", "priority"):
            values = getattr(self, column)
            if values is not None and len(values) != len(self):
                raise TraceError(f"column {column} has {len(values)} values, but arrival_ns has {len(self)}")
        self._check_values()
        if self.blocks is not None:
            self.blocks.check_covers(self.num_prompt_tokens)

    def _check_values(self) -> None:
        for column in ("num_prompt_tokens", "num_output_tokens"):
            _refuse(column, getattr(self, column), 1, MAX_TOKENS_PER_ROW)
        _refuse("arrival_ns", self.arrival_ns, 0, 2**63 - 1)
        _refuse("row", self.row, 1, 2**63 - 1)
        early = np.flatnonzero(self.arrival_ns[1:] < self.arrival_ns[:-1])
        if early.size:
            index = int(early[0]) + 1
            raise TraceError(
                f"arrival_ns decreases at index {index}: {self.arrival_ns[index - 1]} then "
                f"{self.arrival_ns[index]}; "
                "sort the rows by arrival first (readers do, and count what they moved)"
            )

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def __getitem__(self, rows: slice) -> Trace:
        """The rows of a slice with a positive step, the times as they are, the report extended."""
        if not isinstance(rows, slice):
            raise TypeError(
                f"a trace is sliced, as in trace[10:20]; an index of type {type(rows).__name__} is not"
            )
        if rows.step is not None and rows.step < 1:
            raise ValueError(f"the step of a trace slice must be at least 1, not {rows.step}")
        index = np.arange(len(self))[rows]
        start, stop, step = rows.indices(len(self))
        kept = self.take(index)
        left = Tally("dropped", "outside the slice", len(self) - len(kept))
        report = self.report.extended(f"slice [{start}:{stop}:{step}]", len(kept), [left])
        return replace(kept, report=report)

    def take(self, index: npt.NDArray[Any]) -> Trace:
        """The rows of an ascending integer index or a boolean mask; the report is not extended."""
        index = np.flatnonzero(index) if index.dtype == np.bool_ else index
        columns = (
            "arrival_ns",
            "num_prompt_tokens",
            "num_output_tokens",
            "row",
            "tenant",
            "session",
            "priority",
        )
        taken = {name: None if (c := getattr(self, name)) is None else c[index] for name in columns}
        return replace(self, **taken, blocks=None if self.blocks is None else self.blocks.take(index))

    def sha256(self) -> str:
        """Hex digest of what a run can see: times, lengths, block ids, tenant, session and priority.

        Name, source rows and report do not enter it, so a trace and its converted copy have the same digest.
        """
        digest = hashlib.sha256(b"pagedserve trace 1")
        ints: dict[str, IntArray | None] = {
            "arrival_ns": self.arrival_ns,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "priority": self.priority,
        }
        if self.blocks is not None:
            ints["block_size"] = np.array([self.blocks.block_size], dtype=np.int64)
            ints["block_offsets"] = self.blocks.offsets
            ints["block_ids"] = self.blocks.ids
        for label, values in ints.items():
            if values is not None:
                digest.update(f"\n{label} {len(values)}\n".encode())
                digest.update(values.astype("<i8").tobytes())
        for label, strings in (("tenant", self.tenant), ("session", self.session)):
            if strings is not None:
                digest.update(f"\n{label} {len(strings)}\n{json.dumps(strings.tolist())}".encode())
        return digest.hexdigest()

    def describe(self) -> TraceSummary:
        """Counts, rates, lengths and what an infinite prefix cache would find; see `TraceSummary`."""
        return summarise(self)


def _frozen_labels(column: str, values: Any) -> Labels:
    """A read-only object array of strings that fit on one line and encode as UTF-8."""
    labels = np.empty(len(values), dtype=object)
    labels[:] = list(values)
    for index, label in enumerate(labels):
        problem = label_problem(label)
        if problem is not None:
            raise TraceError(f"{column} at index {index} {problem}: {label!r}")
    labels.setflags(write=False)
    return labels


def label_problem(label: object) -> str | None:
    """Why a value cannot be a tenant or session, or None if it can."""
    if not isinstance(label, str):
        return "must be a string"
    if not label.isascii() and any("\ud800" <= char <= "\udfff" for char in label):
        return "is not valid UTF-8"
    if any(char in label for char in "\n\r\0"):
        return "must be on one line and without NUL"
    return None


def _refuse(column: str, values: IntArray, low: int, high: int) -> None:
    """Raise naming the first value outside ``low..high``."""
    wrong = np.flatnonzero((values < low) | (values > high))
    if wrong.size:
        index = int(wrong[0])
        raise TraceError(f"{column} at index {index} is {values[index]}, outside {low}..{high}")
