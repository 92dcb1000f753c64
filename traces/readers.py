"""Reading traces: one function for all formats, and the registry that a further format joins.

A further format is one small file with a `TraceFormat`, handed to `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pagedserve.traces import azure, mooncake, native
from pagedserve.traces.assembly import assemble
from pagedserve.traces.native import write_trace
from pagedserve.traces.report import TraceError, TraceReport
from pagedserve.traces.rows import NumberedLines, OnError, RowsState, numbered_lines
from pagedserve.traces.trace import Trace

__all__ = ["TraceFormat", "format_names", "read_trace", "register", "trace_formats", "write_trace"]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to know and read one format.

    ``recognises`` sees the first one or two lines of a file. ``parse`` reads all lines into the rows, header
    included. ``rebases``: times are moved so that the first arrival is 0. ``relative_clock``: times count
    from the trace's start, so that two traces joined in one file show as a clock that starts over.
    """

    name: str
    description: str
    recognises: Callable[[Sequence[str]], bool]
    parse: Callable[[NumberedLines, RowsState], None]
    rebases: bool
    relative_clock: bool


_FORMATS: dict[str, TraceFormat] = {}


def register(trace_format: TraceFormat) -> None:
    """Make a format known by its name. A name can be taken once."""
    if trace_format.name in _FORMATS:
        raise ValueError(f"a trace format named {trace_format.name!r} is registered already")
    _FORMATS[trace_format.name] = trace_format


def trace_formats() -> tuple[TraceFormat, ...]:
    """All registered formats, in order of registration."""
    return tuple(_FORMATS.values())


def format_names() -> tuple[str, ...]:
    """The names of all registered formats."""
    return tuple(_FORMATS)


register(
    TraceFormat(
        "azure2023", "Azure LLM inference 2023, CSV", azure.recognises_2023, azure.parse_2023, True, False
    )
)
register(
    TraceFormat(
        "azure2024", "Azure LLM inference 2024, CSV", azure.recognises_2024, azure.parse_2024, True, False
    )
)
register(
    TraceFormat("mooncake", "Mooncake FAST'25, JSON lines", mooncake.recognises, mooncake.parse, True, True)
)
register(TraceFormat("native", "PagedServe's own CSV", native.recognises, native.parse, False, True))


def read_trace(path: str | Path, format: str | None = None, on_error: OnError = "raise") -> Trace:
    """Read a trace file, plain or gzip, whatever its name.

    ``format`` is one of `format_names`; None detects it from the first lines, and the report says what was
    detected. ``on_error`` says what a bad row does: "raise" stops at the first with file, line, field and
    value; "drop" leaves such rows out and counts them in ``trace.report``, with examples, by reason.

    Rows out of time order are sorted stably and counted; rows of one instant keep their order; duplicates
    stay. An output of 0 tokens becomes 1 and is counted. Times start at 0 except in the native format, which
    keeps them; the report's ``origin_ns`` is what was subtracted.

    Raises `TraceError` for anything wrong with the content, also where ``on_error`` is "drop" if no row can
    be blamed: a header without the needed columns, a damaged gzip stream, a clock that starts over, an empty
    file.
    """
    path = Path(path)
    if on_error not in ("raise", "drop"):
        raise ValueError(f'on_error must be "raise" or "drop", not {on_error!r}')
    head = [text for _, text in islice(numbered_lines(path), 2)]
    if not head:
        raise TraceError(f"{path.name} is empty")
    chosen = _detect(path.name, head) if format is None else _named(format)
    rows = RowsState(path.name, on_error)
    chosen.parse(numbered_lines(path), rows)
    report = TraceReport(
        path.name, chosen.name, rows.num_rows, 0, detected=format is None, notes=tuple(rows.notes)
    )
    return assemble(rows, _stem(path), report, chosen.rebases, chosen.relative_clock)


def _named(name: str) -> TraceFormat:
    if name not in _FORMATS:
        raise TraceError(f"there is no trace format {name!r}; choose one of {', '.join(_FORMATS)}")
    return _FORMATS[name]


def _detect(file: str, head: Sequence[str]) -> TraceFormat:
    """The one format that recognises the first lines."""
    fitting = [candidate for candidate in _FORMATS.values() if candidate.recognises(head)]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(f"{known.name} ({known.description})" for known in fitting or _FORMATS.values())
    first = head[0] if len(head[0]) <= 120 else head[0][:117] + "..."
    said = "fits more than one trace format" if fitting else "fits no trace format"
    raise TraceError(f"{file} {said}: its first line is {first!r}. Name the format, one of: {known}")


def _stem(path: Path) -> str:
    """The file's name without .gz and then without its last suffix."""
    name = path.name.removesuffix(".gz")
    return name.rsplit(".", 1)[0] or name
