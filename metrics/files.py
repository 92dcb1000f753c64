"""Writing a run record to a folder and reading it back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pagedserve.metrics.record import RecordError, RunRecord, check_header, check_schema
from pagedserve.metrics.record_tables import (
    CLIENT_SCHEMAS,
    FORMAT_VERSION,
    OPTIONAL_TABLES,
    SCHEMAS,
    SINCE_VERSION_3,
    TABLES,
)

HEADER_FILE = "header.json"


def write_record(record: RunRecord, folder: Path, *, overwrite: bool = False) -> None:
    """Write ``record`` to ``folder``; a reader sees all of it or nothing.

    The files are written into a sibling folder that is then renamed. A folder that holds anything is
    refused; with ``overwrite`` it is replaced, but only if all it holds is a record.
    """
    _refuse_unless_replaceable(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A sibling is on the same file system, so that the rename is atomic.
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    fresh = folder.parent / f".{folder.name}.writing-{mark}"
    fresh.mkdir()
    try:
        _write_files(record, fresh)
        _swap(fresh, folder, folder.parent / f".{folder.name}.replaced-{mark}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_record(folder: Path) -> RunRecord:
    """Read the record in ``folder``; raises ``RecordError`` naming the file, what was expected and found."""
    if not folder.is_dir():
        raise RecordError(f"{folder}: expected the folder of a run record, found {_kind_of(folder)}")
    header = _read_header(folder / HEADER_FILE)
    tables: dict[str, pa.Table | None] = {}
    for name in TABLES:
        path = folder / f"{name}.parquet"
        if name in OPTIONAL_TABLES and not path.exists():
            tables[name] = None
        else:
            tables[name] = _read_table(name, path, header)
    header["format_version"] = FORMAT_VERSION  # the tables are this version's now
    try:
        return RunRecord(header, **tables)
    except RecordError as error:  # a null or a word that is not allowed: found in memory, name the folder
        raise RecordError(f"{folder}: {error}") from error


def _write_files(record: RunRecord, folder: Path) -> None:
    text = json.dumps(record.header, indent=2, sort_keys=True, allow_nan=False)
    (folder / HEADER_FILE).write_text(text + "\n", encoding="utf-8")
    for name, table in record.tables().items():
        schema = (CLIENT_SCHEMAS if record.is_client else SCHEMAS)[name]
        ordered = table.select(schema.names).cast(schema)
        pq.write_table(ordered, folder / f"{name}.parquet", compression="zstd")


def _refuse_unless_replaceable(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RecordError(f"{folder}: cannot write a record here: a file has this name")
    names = sorted(path.name for path in folder.iterdir())
    if names and not overwrite:
        raise RecordError(f"{folder}: not empty; choose another folder, or overwrite the record in it")
    ours = {HEADER_FILE, *(f"{name}.parquet" for name in TABLES)}
    others = [name for name in names if name not in ours]
    if others:
        raise RecordError(f"{folder}: will not overwrite a folder that also holds {', '.join(others[:5])}")


def _swap(fresh: Path, folder: Path, retired: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
        return
    folder.rename(retired)
    try:
        fresh.rename(folder)
    except OSError:
        retired.rename(folder)
        raise
    shutil.rmtree(retired)


def _read_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecordError(f"{path}: expected the header of a run record, found {_kind_of(path)}")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: expected JSON: {error}") from error
    check_header(header, str(path))
    return header


def _read_table(name: str, path: Path, header: dict[str, Any]) -> pa.Table:
    if not path.is_file():
        raise RecordError(f"{path}: expected the table {name}, found {_kind_of(path)}")
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
            if header["format_version"] < 3:
                table = _with_new_columns(name, table, header["kind"] == "client")
            check_schema(name, table.schema, str(path))
            return table.select(SCHEMAS[name].names)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: expected a Parquet file: {error}") from error


def _with_new_columns(name: str, table: pa.Table, is_client: bool) -> pa.Table:
    """Add what a record from before version 3 lacks: nothing was ever swapped."""
    for field in SCHEMAS[name]:
        if field.name in SINCE_VERSION_3[name] and field.name not in table.column_names:
            none: Any = [] if pa.types.is_list(field.type) else None if is_client else 0
            table = table.append_column(field.name, pa.array([none] * table.num_rows, field.type))
    return table


def _kind_of(path: Path) -> str:
    if not path.exists():
        return "nothing"
    return "a folder" if path.is_dir() else "a file"
