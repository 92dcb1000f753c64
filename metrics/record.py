"""The record of a run: what engine, simulator and a server's client write, and all that metrics read.

A record is a folder: ``header.json`` and one Parquet file per table. `pagedserve.metrics.record_tables` is the
one place that names every column, its type and its meaning; whatever disagrees with it is refused with a
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

from pagedserve.metrics.record_tables import (
    CLIENT_SCHEMAS,
    KINDS,
    READ_VERSIONS,
    SCHEMAS,
    TABLES,
    UNSEEN,
)


class RecordError(ValueError):
    """A record, or a part of one, is not what this version reads: says where, what was expected and found."""


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
