"""What is sent to a simulated replica, when, and what becomes of it: from a trace or from a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from pagedserve.metrics.record import RunRecord
from pagedserve.policy.request import Request
from pagedserve.traces.requests import to_requests
from pagedserve.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Abort:
    """A client gives up on ``request`` at ``at_ns``; ``reason`` is "abort" or "timeout"."""

    request: int
    at_ns: int
    reason: str = "abort"

    def __post_init__(self) -> None:
        if self.reason not in ("abort", "timeout"):
            raise ValueError(f"the reason of an abort is {self.reason!r}; it is 'abort' or 'timeout'")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are sent, and their true output lengths.

    ``sends`` holds ``(request, due_ns, add_ns)``: ``due_ns`` is when the request was planned to be sent and
    ``add_ns`` when the scheduler hears of it. ``lengths[id]`` is the output after which the request stops by
    itself; an id without a length runs to its limit.
    """

    sends: Iterable[tuple[Request, int, int]]
    num_requests: int
    lengths: Mapping[int, int] | Sequence[int]
    aborts: Sequence[Abort] = ()
    failed: frozenset[int] = frozenset()
    """Requests that fail behind their length: their next token cannot be chosen."""
    generated_keys: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Recorded keys of generated blocks, by (request, block index)."""


def trace_workload(
    trace: Trace, block_size: int | None, max_tokens: int | None = None, aborts: Sequence[Abort] = ()
) -> Workload:
    """Every row of a trace, sent at its arrival; ``block_size`` None leaves prompts without prefix keys.

    Aborts name positions in the trace; one before its request's arrival has no effect.
    """
    for abort in aborts:
        if not 0 <= abort.request < len(trace):
            raise ValueError(
                f"abort of request {abort.request}; the trace has requests 0 to {len(trace) - 1}"
            )
    requests = to_requests(trace, block_size, max_tokens)
    sends = ((request, request.arrival_ns, request.arrival_ns) for request in requests)
    return Workload(
        sends, len(trace), trace.num_output_tokens.tolist(), sorted(aborts, key=lambda a: a.at_ns)
    )


def recorded_workload(record: RunRecord) -> Workload:
    """The intake of a recorded run: every add and abort at the time of its call, every stop at its length.

    The run must have kept its plans, for only then were prefix keys kept.
    """
    if record.plans is None:
        raise ValueError("the record has no plans.parquet; record the run with its plans to replay it")
    rows = {row["request"]: row for row in record.requests.to_pylist()}
    sends: list[tuple[Request, int, int]] = []
    aborts: list[Abort] = []
    for call in record.calls.to_pylist():
        if call["kind"] == "add":
            row = rows[call["subject"]]
            sends.append((_recorded_request(row), row["due_ns"], call["now_ns"]))
        elif call["kind"] == "abort":
            reason = rows[call["subject"]]["finish_reason"] if call["subject"] in rows else "abort"
            aborts.append(
                Abort(call["subject"], call["now_ns"], "timeout" if reason == "timeout" else "abort")
            )
    ended = {i: row for i, row in rows.items() if row["finish_reason"] in ("stop", "error")}
    lengths = {i: row["num_output_tokens"] for i, row in ended.items()}
    failed = frozenset(i for i, row in ended.items() if row["finish_reason"] == "error")
    keys: dict[tuple[int, int], int] = {}
    for plan in record.plans.select(["filled_requests", "filled_indices", "filled_keys"]).to_pylist():
        filled = zip(plan["filled_requests"], plan["filled_indices"], plan["filled_keys"], strict=True)
        keys.update({(request, index): key for request, index, key in filled})
    return Workload(sends, len(sends), lengths, aborts, failed, keys)


def _recorded_request(row: Mapping[str, object]) -> Request:
    facts = {
        field.name: row[field.name] for field in fields(Request) if field.name not in ("id", "prefix_keys")
    }
    keys = row["prefix_keys"]
    return Request(id=row["request"], prefix_keys=None if keys is None else tuple(keys), **facts)  # pyright: ignore
