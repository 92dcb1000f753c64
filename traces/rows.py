"""From lines of a file to the columns of a trace: what all readers share.

A format file parses one line at a time and knows neither file nor line number: a bad value raises
`FieldError`, and `RowsState` turns it into an error that names the place, or into a counted drop.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagedserve.traces.report import MAX_EXAMPLES, Example, Kind, Tally, TraceError
from pagedserve.traces.trace import MAX_TOKENS_PER_ROW

OnError = Literal["raise", "drop"]
NumberedLines = Iterator[tuple[int, str]]

MAX_INT64 = 2**63 - 1
ZERO_OUTPUT = "an output of 0 tokens is taken as 1: serving a prompt always samples one token"
_QUOTED = re.compile(r'"((?:[^"]|"")*)"(?=,|\Z)')
_BOM = b"\xef\xbb\xbf"


class FieldError(ValueError):
    """A value in a row is wrong. ``problem`` is the same for all rows with that fault: drops count by it."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field} {problem}: {value!r}")
        self.field = field
        self.problem = problem
        text = value if isinstance(value, str) else str(value)
        self.value = repr(text if len(text) <= 80 else text[:77] + "...")


def numbered_lines(path: Path) -> NumberedLines:
    """The lines of a plain or gzip file (told by its first bytes), counted from 1, without their line ends.

    LF or CRLF, with or without one after the last line; a byte-order mark and blank lines at the end are
    skipped. Bytes that are not UTF-8 become lone surrogates, which no field parser accepts.
    Raises `TraceError` where a gzip stream is damaged.
    """
    with path.open("rb") as plain:
        is_gzip = plain.read(2) == b"\x1f\x8b"
    num_blank = line = 0
    with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
        try:
            for line, raw in enumerate(stream, 1):
                text = raw.removeprefix(_BOM) if line == 1 else raw
                text = text.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")
                if not text.strip():
                    num_blank += 1
                    continue
                yield from ((blank, "") for blank in range(line - num_blank, line))
                num_blank = 0
                yield line, text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path.name}: the gzip stream is damaged after line {line}: {error}") from error


def split_csv(text: str) -> list[str]:
    """The fields of one CSV line; a field in double quotes may hold commas and doubled quotes."""
    if '"' not in text:
        return text.split(",")
    fields: list[str] = []
    start = 0
    while True:
        if quoted := _QUOTED.match(text, start):
            fields.append(quoted[1].replace('""', '"'))
            end = quoted.end()
        else:
            comma = text.find(",", start)
            end = len(text) if comma < 0 else comma
            if '"' in text[start:end]:
                raise FieldError("row", text, "has a quote that does not enclose a whole field")
            fields.append(text[start:end])
        if end == len(text):
            return fields
        start = end + 1


def whole(field: str, text: str, low: int, high: int) -> int:
    """The integer a field holds, digits only ("1.0", "1_000", " 1" are refused), within ``low..high``."""
    digits = text[1:] if low < 0 and text.startswith("-") else text
    if not (digits.isdigit() and digits.isascii()):
        raise FieldError(field, text, f"is not a whole number in {low}..{high}")
    value = int(text) if len(digits) <= 20 else MAX_INT64 + 1
    if not low <= value <= high:
        raise FieldError(field, text, f"is outside {low}..{high}")
    return value


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """Where the wanted columns of a CSV file stand, whatever their order."""

    positions: tuple[int, ...]
    num_columns: int

    def pick(self, text: str) -> list[str]:
        """The wanted fields of a line, in the order asked for."""
        if not text:
            raise FieldError("row", "", "is an empty line between rows")
        fields = split_csv(text)
        if len(fields) != self.num_columns:
            raise FieldError("row", text, f"does not have {self.num_columns} fields as the header does")
        return [fields[position] for position in self.positions]


@dataclass(slots=True)
class RowsState:
    """Columns of a trace while its file is read, in file order, and counts of what happened to its rows."""

    file: str
    on_error: OnError
    num_rows: int = 0
    block_size: int | None = None
    block_field: str = ""
    arrival_field: str = "arrival_ns"
    output_field: str = "num_output_tokens"
    arrival_ns: array[int] = field(default_factory=lambda: array("q"))
    num_prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    num_output_tokens: array[int] = field(default_factory=lambda: array("q"))
    row: array[int] = field(default_factory=lambda: array("q"))
    line: array[int] = field(default_factory=lambda: array("q"))
    block_ids: array[int] = field(default_factory=lambda: array("q"))
    block_ends: array[int] = field(default_factory=lambda: array("q", [0]))
    labels: dict[str, list[str]] = field(default_factory=dict)
    priority: array[int] | None = None
    notes: list[str] = field(default_factory=list)
    counts: dict[tuple[Kind, str], int] = field(default_factory=dict)
    examples: dict[tuple[Kind, str], list[Example]] = field(default_factory=dict)

    def find_columns(self, line: int, names: Sequence[str], wanted: Sequence[str]) -> CsvHeader:
        """Where the wanted columns stand, all of which must be there; others are ignored and noted."""
        missing = [name for name in wanted if name not in names]
        if missing:
            raise TraceError(
                f"{self.file} line {line}: the header lacks {', '.join(missing)}; it has {', '.join(names)}"
            )
        ignored = [name for name in names if name not in wanted]
        if ignored:
            self.notes.append(f"columns ignored: {', '.join(ignored)}")
        return CsvHeader(tuple(names.index(name) for name in wanted), len(names))

    def header_names(self, line: int, text: str) -> list[str]:
        """The column names of a CSV header, each at most once."""
        try:
            names = split_csv(text)
        except FieldError as error:
            raise TraceError(f"{self.file} line {line}: header: {error}") from error
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise TraceError(
                f"{self.file} line {line}: the header names {', '.join(map(repr, twice))} more than once"
            )
        return names

    def add(
        self, line: int, arrival_ns: int, num_prompt: int, num_output: int, row: int | None = None
    ) -> None:
        """Take one row whose values are valid; an output of 0 tokens becomes 1 and is counted."""
        self.num_rows += 1
        self.row.append(self.num_rows if row is None else row)
        self.line.append(line)
        self.arrival_ns.append(arrival_ns)
        self.num_prompt_tokens.append(num_prompt)
        if num_output == 0:
            self.count("changed", ZERO_OUTPUT, line, self.output_field, "0")
        self.num_output_tokens.append(max(1, num_output))

    def add_blocks(self, ids: Sequence[int]) -> None:
        """Take the block ids of the row added last."""
        self.block_ids.extend(ids)
        self.block_ends.append(len(self.block_ids))

    def reject(self, line: int, error: FieldError) -> None:
        """Raise for a bad row, or drop and count it."""
        self.num_rows += 1
        self.refuse(line, self.num_rows, error)

    def refuse(self, line: int, row: int, error: FieldError) -> None:
        """Raise with file and line, or count a drop, for a row already counted as read."""
        if self.on_error == "raise":
            raise TraceError(
                f"{self.file} line {line}: {error.field} {error.problem}; found {error.value} "
                '(on_error="drop", on the command line --on-error drop, leaves such rows out and counts them)'
            ) from error
        self.count("dropped", f"{error.field} {error.problem}", line, error.field, error.value, row)

    def count(
        self, kind: Kind, reason: str, line: int, field: str, value: str, row: int | None = None
    ) -> None:
        """Count one row under a reason and keep it as an example if it is among the first."""
        key = (kind, reason)
        self.counts[key] = self.counts.get(key, 0) + 1
        examples = self.examples.setdefault(key, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(Example(self.file, self.num_rows if row is None else row, line, field, value))

    def tallies(self) -> list[Tally]:
        """What was counted so far."""
        return [
            Tally(kind, why, n, tuple(self.examples[kind, why])) for (kind, why), n in self.counts.items()
        ]


def prompt_tokens(field: str, text: str) -> int:
    """A prompt length: at least 1, for an empty prompt cannot be served."""
    return whole(field, text, 1, MAX_TOKENS_PER_ROW)


def output_tokens(field: str, text: str) -> int:
    """An output length; 0 is let through here and counted by `RowsState.add`."""
    return whole(field, text, 0, MAX_TOKENS_PER_ROW)
