"""The record of a run: what engine, simulator and a server's client write, and all that metrics read.

A record is a folder: ``header.json`` and one Parquet file per table. ``TABLES`` below is the one place
that names every column, its type and its meaning; whatever disagrees with it is refused with a
``RecordError`` that says where. Every time is an integer number of nanoseconds on the run's own clock.

A client of a server sees tokens arrive, not how they are made: in its record (kind "client") a row of
``steps`` is one instant of arrival, and the columns ``UNSEEN`` may be null. In no other record may they.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

FORMAT_VERSION = 3
READ_VERSIONS = (1, 2, 3)  # version 1 knew no records of clients, 2 no swaps: `SINCE_VERSION_3`
KINDS = ("simulated", "live", "client")
FINISH_REASONS = ("stop", "length", "abort", "timeout", "refused", "error", "unfinished")
CALL_KINDS = ("add", "abort", "schedule", "commit")

I64, I32, TEXT, LIST = pa.int64(), pa.int32(), pa.string(), pa.list_(pa.int64())


class RecordError(ValueError):
    """A record, or a part of one, is not what this version reads: says where, what was expected and found."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its Arrow type, its meaning and unit, whether it may be null, its words."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False
    words: tuple[str, ...] | None = None


STEPS = (  # State columns describe the moment after this step was scheduled.
    Column("step", I64, "step number, strictly increasing"),
    Column("schedule_ns", I64, "when the step was planned"),
    Column("launch_ns", I64, "when the device began it"),
    Column("commit_ns", I64, "when its outcomes were committed: the time of the tokens it emitted"),
    Column("num_prefill_tokens", I32, "prompt or recomputed tokens computed in prefill chunks"),
    Column("num_decode_tokens", I32, "tokens computed by the decode group, one a request"),
    Column("num_running", I32, "requests holding a place in the batch"),
    Column("num_waiting", I32, "requests waiting, preempted ones included"),
    Column("num_blocks_used", I32, "blocks referenced by requests, quarantined ones included"),
    Column("num_blocks_cached", I32, "blocks nobody references whose content the prefix cache keeps"),
    Column("num_blocks_free", I32, "blocks with no content"),
    Column("num_wasted_slots", I64, "token slots in used blocks that hold no token"),
    Column("num_preemptions", I32, "requests preempted by this step's plan"),
    Column("num_discarded_tokens", I32, "tokens this step computed for requests that had already stopped"),
    Column("num_recomputed_tokens", I32, "tokens this step computed again after a preemption"),
    Column("num_prefix_hit_tokens", I32, "tokens the prefix cache saved this step from computing"),
    Column("num_blocks_swapped_out", I32, "blocks copied to host memory before this step computed"),
    Column("num_blocks_swapped_in", I32, "blocks copied back from host memory before this step computed"),
    Column("num_cpu_blocks_used", I32, "blocks of host memory that hold KV of preempted requests"),
    Column("plan_digest", I64, "hash of the step's plan"),
)
REQUESTS = (
    Column("request", I64, "request id, unique"),
    Column("due_ns", I64, "when the request was planned to be sent"),
    Column("arrival_ns", I64, "when it was sent: latencies count from here"),
    Column("num_prompt_tokens", I64, "prompt length"),
    Column("max_tokens", I64, "declared limit of the output length"),
    Column("num_output_tokens", I64, "tokens emitted"),
    Column("finish_reason", TEXT, "how it ended", words=FINISH_REASONS),
    Column("first_schedule_ns", I64, "when a step first included it; null: never", nullable=True),
    Column("finish_ns", I64, "when it ended; null: it had not", nullable=True),
    Column("num_preemptions", I32, "how often it was preempted"),
    Column("num_prefix_hit_tokens", I64, "prompt tokens found in the prefix cache at first admission"),
    Column("num_recomputed_tokens", I64, "tokens computed again after preemptions"),
    Column("priority", I32, "as given by the caller"),
    Column("tenant", TEXT, "as given by the caller"),
    Column("deadline_ns", I64, "as given by the caller; null: none", nullable=True),
    Column("predicted_output_tokens", I64, "as given by the caller; null: none", nullable=True),
    Column("error", TEXT, "why it was refused or failed; null: it was not", nullable=True),
    Column("prefix_keys", LIST, "keys of its full prompt blocks; null: not cacheable", nullable=True),
)
EMISSIONS = (  # A run of tokens of one request; see metrics.tokens for how it expands.
    Column("request", I64, "request id"),
    Column("first_step", I64, "step that emitted the first token of the run"),
    Column("num_steps", I64, "tokens in the run: the others come one in each following step that decodes"),
)
CALLS = (  # Every call of the scheduler's four verbs, in order.
    Column("kind", pa.dictionary(I32, TEXT), "verb", words=CALL_KINDS),
    Column("subject", I64, "request id or step; null: a schedule that planned nothing", nullable=True),
    Column("now_ns", I64, "the time passed in"),
)
PLANS = (  # One row a step, the plan as flat lists: entry j of the lists of one group belongs together.
    Column("step", I64, "step number"),
    Column("new_requests", LIST, "requests the worker hears of for the first time"),
    Column("chunk_requests", LIST, "prefill chunks: request"),
    Column("chunk_starts", LIST, "prefill chunks: tokens already in KV"),
    Column("chunk_tokens", LIST, "prefill chunks: tokens to compute"),
    Column("joined", LIST, "requests that enter the decode group"),
    Column("left", LIST, "requests that leave the decode group"),
    Column("preempted", LIST, "requests preempted"),
    Column("departed", LIST, "requests whose state the worker drops"),
    Column("block_requests", LIST, "appended blocks: request"),
    Column("block_counts", LIST, "appended blocks: how many of block_ids are this request's"),
    Column("block_ids", LIST, "appended blocks: ids, requests one after another"),
    Column("out_requests", LIST, "swapped out: request"),
    Column("out_counts", LIST, "swapped out: how many of the blocks are this request's"),
    Column("out_blocks", LIST, "swapped out: blocks, requests one after another"),
    Column("out_host_blocks", LIST, "swapped out: the host blocks they are copied to"),
    Column("in_requests", LIST, "swapped in: request"),
    Column("in_counts", LIST, "swapped in: how many of the blocks are this request's"),
    Column("in_blocks", LIST, "swapped in: blocks, requests one after another"),
    Column("in_host_blocks", LIST, "swapped in: the host blocks they are copied from"),
    Column("filled_requests", LIST, "blocks this step fills: request"),
    Column("filled_indices", LIST, "blocks this step fills: index in the request's block table"),
    Column("filled_keys", LIST, "blocks this step fills: prefix key"),
    Column("num_decodes", I32, "requests in the decode group"),
)
TABLES: dict[str, tuple[Column, ...]] = {
    "steps": STEPS,
    "requests": REQUESTS,
    "emissions": EMISSIONS,
    "calls": CALLS,
    "plans": PLANS,
}
OPTIONAL_TABLES = ("plans",)
SINCE_VERSION_3: dict[str, frozenset[str]] = {
    **dict.fromkeys(TABLES, frozenset()),
    "steps": frozenset(("num_blocks_swapped_out", "num_blocks_swapped_in", "num_cpu_blocks_used")),
    "plans": frozenset(c.name for c in PLANS if c.name.startswith(("out_", "in_"))),
}
UNSEEN: dict[str, frozenset[str]] = {
    **dict.fromkeys(TABLES, frozenset()),
    "steps": frozenset(c.name for c in STEPS) - {"step", "commit_ns"},
    "requests": frozenset(("num_preemptions", "num_prefix_hit_tokens", "num_recomputed_tokens")),
}
SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema([pa.field(c.name, c.type, c.nullable) for c in columns])
    for table, columns in TABLES.items()
}
CLIENT_SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema([pa.field(c.name, c.type, c.nullable or c.name in UNSEEN[table]) for c in columns])
    for table, columns in TABLES.items()
}
HEADER_KEYS: dict[str, tuple[type, ...]] = {
    "format_version": (int,),
    "kind": (str,),
    "policy": (dict,),
    "limits": (dict,),
    "overlap_depth": (int, type(None)),  # null: a client does not see it
    "seed": (int,),
    "device": (dict, type(None)),
    "cost": (dict, type(None)),
    "trace": (dict,),
    "versions": (dict,),
    "counters": (dict,),
}


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """A run: its header (JSON values, ``HEADER_KEYS`` at least) and its tables (``TABLES``).

    Checked when made: a header or a table that is not as declared raises ``RecordError``. Compare two
    records with ``metrics.identity``; ``==`` would compare objects.
    """

    header: dict[str, Any]
    steps: pa.Table
    requests: pa.Table
    emissions: pa.Table
    calls: pa.Table
    plans: pa.Table | None = None

    def __post_init__(self) -> None:
        check_header(self.header, "header")
        for name, table in self.tables().items():
            check_table(name, table, name, self.is_client)

    @property
    def is_client(self) -> bool:
        """Whether a client of a server wrote it, to whom the columns ``UNSEEN`` may be null."""
        return self.header["kind"] == "client"

    def tables(self) -> dict[str, pa.Table]:
        """The tables this record has, by name, in the order of ``TABLES``."""
        present = {name: getattr(self, name) for name in TABLES}
        return {name: table for name, table in present.items() if table is not None}

    def array(self, table: str, column: str) -> np.ndarray:
        """A column without nulls as numpy, one entry a row, in the column's own integer type."""
        chunked = getattr(self, table).column(column)
        if chunked.null_count:
            raise RecordError(
                f"{table}: column {column} holds {chunked.null_count} nulls; use nullable_array"
            )
        return chunked.to_numpy()

    def nullable_array(self, table: str, column: str) -> tuple[np.ndarray, np.ndarray]:
        """An integer column that may hold nulls as (values, present); values are 0 where not present."""
        chunked = getattr(self, table).column(column)
        return chunked.fill_null(0).to_numpy(), chunked.is_valid().to_numpy()

    def array_or_nan(self, table: str, column: str) -> np.ndarray:
        """A number column as ``array`` gives it; as float64 with NaN for null if a client did not see it."""
        return getattr(self, table).column(column).to_numpy() if self.is_client else self.array(table, column)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the record to ``folder``, all of it or nothing; see ``metrics.files.write_record``."""
        from pagedserve.metrics.files import write_record  # files needs this module's classes

        write_record(self, Path(folder), overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path) -> RunRecord:
        """Read the record in ``folder``; raises ``RecordError`` naming the file and what is wrong with it."""
        from pagedserve.metrics.files import read_record

        return read_record(Path(folder))


Columns = Mapping[str, Sequence[Any] | np.ndarray]


def build_table(name: str, columns: Columns, is_client: bool = False) -> pa.Table:
    """Table ``name`` from one list or array per column, converted to the declared types and checked.

    ``is_client``: for a record of kind "client". Raises ``RecordError`` for a missing or unknown column, a
    value that does not fit, a null that is not allowed, or columns of unequal length.
    """
    schema = (CLIENT_SCHEMAS if is_client else SCHEMAS)[name]
    _check_names(columns, schema, name)
    arrays = [_convert(columns[field.name], field, name) for field in schema]
    lengths = {field.name: len(array) for field, array in zip(schema, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise RecordError(f"{name}: columns differ in length: {lengths}")
    table = pa.Table.from_arrays(arrays, schema=schema)
    check_table(name, table, name, is_client)
    return table


def _convert(values: Sequence[Any] | np.ndarray, field: pa.Field, name: str) -> pa.Array:
    if isinstance(values, np.ndarray) and values.dtype.kind in "UO":
        values = values.tolist()  # Arrow reads numpy text as plain strings only, not as a dictionary's
    try:
        if pa.types.is_integer(field.type) or pa.types.is_list(field.type):
            return pa.array(values).cast(field.type)  # given the type at once, Arrow would cut 0.5 to 0
        return pa.array(values, type=field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{name}: column {field.name}: expected {field.type}: {error}") from error


def check_header(header: Any, where: str) -> None:
    """Raise ``RecordError`` unless ``header`` has the version read here and every key, rightly typed."""
    if not isinstance(header, dict):
        raise RecordError(f"{where}: expected a JSON object, found {type(header).__name__}")
    version = header.get("format_version")
    if type(version) is not int or version not in READ_VERSIONS:
        raise RecordError(f"{where}: format_version: expected one of {READ_VERSIONS}, found {version!r}")
    for key, types in HEADER_KEYS.items():
        if key not in header:
            raise RecordError(f"{where}: key {key} is missing")
        if type(header[key]) not in types:
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise RecordError(f"{where}: key {key}: expected {expected}, found {header[key]!r}")
    if header["kind"] not in KINDS:
        raise RecordError(f"{where}: key kind: expected one of {', '.join(KINDS)}, found {header['kind']!r}")
    if header["overlap_depth"] is None and header["kind"] != "client":
        raise RecordError(f"{where}: key overlap_depth: expected int, found None; only a client sees none")
    try:
        json.dumps(header, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: not JSON: {error}") from error


def check_schema(name: str, found: pa.Schema, where: str) -> None:
    """Raise ``RecordError`` unless ``found`` has exactly the declared columns, in any order, typed so."""
    _check_names(found.names, SCHEMAS[name], where)
    for field in SCHEMAS[name]:
        if found.field(field.name).type != field.type:
            raise RecordError(
                f"{where}: column {field.name}: expected {field.type}, found {found.field(field.name).type}"
            )


def check_table(name: str, table: pa.Table, where: str, is_client: bool = False) -> None:
    """Raise ``RecordError`` unless ``table`` is a legal table ``name`` (of a client): schema, nulls and words."""
    check_schema(name, table.schema, where)
    for column in TABLES[name]:
        values = table.column(column.name)
        if values.null_count and not (column.nullable or (is_client and column.name in UNSEEN[name])):
            raise RecordError(f"{where}: column {column.name}: expected no nulls, found {values.null_count}")
        if column.words is not None:
            unknown = sorted(set(values.unique().to_pylist()) - set(column.words))
            if unknown:
                raise RecordError(
                    f"{where}: column {column.name}: expected {', '.join(column.words)}; found {unknown}"
                )


def _check_names(found: Mapping[str, Any] | Sequence[str], schema: pa.Schema, where: str) -> None:
    names = list(found)
    missing = [n for n in schema.names if n not in names]
    extra = [n for n in names if n not in schema.names]
    twice = sorted({n for n in names if names.count(n) > 1})
    for what, columns in (("missing", missing), ("unknown", extra), ("repeated", twice)):
        if columns:
            raise RecordError(
                f"{where}: {what} columns {', '.join(columns)}; expected {', '.join(schema.names)}"
            )
