"""PagedServe's own trace format: CSV that keeps everything a trace holds, exactly.

One header line, then one request a line, in arrival order, LF line ends, UTF-8. Columns, in any order:

- ``arrival_ns``: integer nanoseconds, at least 0; kept as it is, not moved to start at 0
- ``num_prompt_tokens``, ``num_output_tokens``: integers from 1 to 2**31 - 1
- ``row`` (optional): data row in the source the trace came from, counted from 1; default this file's
- ``priority`` (optional): integer, lower first
- ``tenant``, ``session`` (optional): text on one line; in double quotes where it holds a comma or a quote
- ``block_ids_<size>`` (optional), such as ``block_ids_512``: ids separated by single spaces, one for every
  <size> prompt tokens, the partial last block included; an id fixes its whole prefix
"""

from __future__ import annotations

import gzip
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagedserve.traces.report import TraceError
from pagedserve.traces.rows import (
    MAX_INT64,
    FieldError,
    NumberedLines,
    RowsState,
    output_tokens,
    prompt_tokens,
    split_csv,
    whole,
)
from pagedserve.traces.trace import Trace, label_problem

REQUIRED = ("arrival_ns", "num_prompt_tokens", "num_output_tokens")
LABELS = ("tenant", "session")
_BLOCK_COLUMN = re.compile(r"block_ids_([1-9]\d{0,8})", re.ASCII)


def recognises(head: Sequence[str]) -> bool:
    """Whether the first line is a header with the required columns."""
    try:
        return set(REQUIRED) <= set(split_csv(head[0]))
    except FieldError:
        return False


def parse(lines: NumberedLines, rows: RowsState) -> None:
    """Read every row; columns that the format does not have are ignored and noted."""
    line, text = next(lines)
    names = rows.header_names(line, text)
    block_columns = [name for name in names if _BLOCK_COLUMN.fullmatch(name)]
    if len(block_columns) > 1:
        raise TraceError(f"{rows.file} line {line}: a trace has one column of block ids, not {block_columns}")
    optional = [name for name in (*LABELS, "row", "priority") if name in names]
    wanted = [*REQUIRED, *optional, *block_columns]
    header = rows.find_columns(line, names, wanted)
    if block_columns:
        rows.block_size, rows.block_field = int(block_columns[0].rsplit("_", 1)[1]), block_columns[0]
    if "priority" in optional:
        rows.priority = array("q")
    rows.labels = {name: [] for name in LABELS if name in optional}
    for line, text in lines:
        try:
            _parse_row(rows, line, dict(zip(wanted, header.pick(text), strict=True)))
        except FieldError as error:
            rows.reject(line, error)


def _parse_row(rows: RowsState, line: int, fields: dict[str, str]) -> None:
    """Check every field of one row, then take it."""
    arrival_ns = whole("arrival_ns", fields["arrival_ns"], 0, MAX_INT64)
    num_prompt = prompt_tokens("num_prompt_tokens", fields["num_prompt_tokens"])
    num_output = output_tokens("num_output_tokens", fields["num_output_tokens"])
    row = whole("row", fields["row"], 1, MAX_INT64) if "row" in fields else None
    priority = 0 if rows.priority is None else whole("priority", fields["priority"], -(2**63), MAX_INT64)
    for name in rows.labels:
        if problem := label_problem(fields[name]):
            raise FieldError(name, fields[name], problem)
    ids = None
    if rows.block_size is not None:
        ids = _block_ids(rows.block_field, fields[rows.block_field], rows.block_size, num_prompt)
    rows.add(line, arrival_ns, num_prompt, num_output, row)
    for name, labels in rows.labels.items():
        labels.append(fields[name])
    if rows.priority is not None:
        rows.priority.append(priority)
    if ids is not None:
        rows.add_blocks(ids)


def _block_ids(name: str, text: str, block_size: int, num_prompt: int) -> array[int]:
    if not (text.replace(" ", "0").isdigit() and text.isascii()):
        raise FieldError(name, text, "is not integers separated by single spaces")
    try:
        ids = array("q", map(int, text.split(" ")))
    except (ValueError, OverflowError) as error:
        problem = f"is not integers of 0..{MAX_INT64} separated by single spaces"
        raise FieldError(name, text, problem) from error
    if len(ids) != -(-num_prompt // block_size):
        found = f"{len(ids)} ids for {num_prompt} tokens"
        raise FieldError(name, found, f"does not have one id for every {block_size} tokens, rounded up")
    return ids


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as native CSV, gzip-compressed if the name ends in ``.gz``.

    The same trace gives the same bytes. All but the report and the name can be read back: the name of a trace
    that is read is the file's.
    """
    path = Path(path)
    columns = _columns(trace)
    with path.open("wb") as plain:
        # No file name and no time in the gzip header, so that equal traces give equal files.
        stream = gzip.GzipFile("", "wb", fileobj=plain, mtime=0) if path.name.endswith(".gz") else plain
        with stream:
            stream.write((",".join(columns) + "\n").encode())
            for fields in zip(*columns.values(), strict=True):
                stream.write((",".join(fields) + "\n").encode())


def _columns(trace: Trace) -> dict[str, Iterator[str]]:
    """The columns that a trace has, as text, by name."""
    ints = {
        "arrival_ns": trace.arrival_ns,
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_output_tokens": trace.num_output_tokens,
        "row": trace.row,
        "priority": trace.priority,
    }
    columns: dict[str, Iterator[str]] = {
        name: map(str, values.tolist()) for name, values in ints.items() if values is not None
    }
    for name, labels in (("tenant", trace.tenant), ("session", trace.session)):
        if labels is not None:
            columns[name] = map(_quoted, labels)
    blocks = trace.blocks
    if blocks is not None:
        rows = (blocks.of(index).tolist() for index in range(len(blocks)))
        columns[f"block_ids_{blocks.block_size}"] = (" ".join(map(str, ids)) for ids in rows)
    return columns


def _quoted(label: str) -> str:
    return '"' + label.replace('"', '""') + '"' if "," in label or '"' in label else label
