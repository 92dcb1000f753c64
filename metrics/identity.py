"""Are two records the same, and where do they first differ?

Used by the checks that the same seed gives the same record and that a simulation takes the decisions of
the live run it replays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.record_tables import SCHEMAS

# What led to what: the first difference in this order is the nearest to its cause.
PARTS = ("header", "calls", "steps", "plans", "requests", "emissions")
MACHINE_KEYS = ("versions",)  # header keys that say where a run was made, not what it was


def content_digest(record: RunRecord, parts: Iterable[str] = PARTS) -> str:
    """SHA-256 of what the record says, whatever its files' bytes and its arrays' layout in memory.

    The header's ``versions`` are left out, so that two machines may agree.
    """
    digest = hashlib.sha256()
    for part in _checked(parts):
        digest.update(f"\n{part}\n".encode())
        if part == "header":
            digest.update(json.dumps(_comparable_header(record), sort_keys=True).encode())
            continue
        table: pa.Table | None = getattr(record, part)
        if table is None:
            digest.update(b"absent")
            continue
        for name in SCHEMAS[part].names:
            digest.update(f"{name} {table.num_rows}\n".encode())
            _digest_array(digest, _flat(table.column(name)))
    return digest.hexdigest()


def records_equal(a: RunRecord, b: RunRecord, parts: Iterable[str] = PARTS) -> bool:
    """Whether the records agree in the given parts (``versions`` in the header aside)."""
    return first_difference(a, b, parts) is None


def first_difference(a: RunRecord, b: RunRecord, parts: Iterable[str] = PARTS) -> str | None:
    """The first place where the records differ, in words with both values; None if they do not.

    Parts are looked at in the order of ``PARTS``; within a table the earliest row counts, then the
    leftmost column. The header's ``versions`` are not compared.
    """
    for part in _checked(parts):
        if part == "header":
            found = _header_difference(_comparable_header(a), _comparable_header(b))
        else:
            found = table_difference(part, getattr(a, part), getattr(b, part))
        if found is not None:
            return found
    return None


def table_difference(name: str, a: pa.Table | None, b: pa.Table | None) -> str | None:
    """The first row and column in which two tables ``name`` of the record differ, or None."""
    if a is None or b is None:
        if a is b:
            return None
        return f"{name}: only the {'second' if a is None else 'first'} record has this table"
    shared = min(a.num_rows, b.num_rows)
    rows = {}
    for column in SCHEMAS[name].names:
        row = _first_differing_row(_flat(a.column(column)), _flat(b.column(column)), shared)
        if row is not None:
            rows[column] = row
    if rows:
        column = min(rows, key=lambda c: rows[c])
        row = rows[column]
        key = SCHEMAS[name].names[0]
        here = "" if column == key else f" ({key} {a.column(key)[row].as_py()})"
        left, right = (_shown(table.column(column)[row].as_py()) for table in (a, b))
        return f"{name}: row {row}{here}, column {column}: {left} in the first, {right} in the second"
    if a.num_rows != b.num_rows:
        return f"{name}: {a.num_rows} rows in the first, {b.num_rows} in the second; those shared are equal"
    return None


def _checked(parts: Iterable[str]) -> list[str]:
    wanted = set(parts)
    unknown = sorted(wanted - set(PARTS))
    if unknown:
        raise ValueError(f"unknown parts {unknown}; a record has {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def _comparable_header(record: RunRecord) -> dict[str, Any]:
    # Through JSON, so that a header made in memory (tuples, integer keys) equals the one read back.
    kept = {key: value for key, value in record.header.items() if key not in MACHINE_KEYS}
    return json.loads(json.dumps(kept))


def _header_difference(a: Any, b: Any, path: str = "header") -> str | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b:
                return f"{path}.{key}: only in the {'first' if key in a else 'second'} record"
            found = _header_difference(a[key], b[key], f"{path}.{key}")
            if found is not None:
                return found
        return None
    # 1, 1.0 and true are equal in Python and different in JSON.
    if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True):
        return None
    return f"{path}: {_shown(a)} in the first, {_shown(b)} in the second"


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _first_differing_row(a: pa.Array, b: pa.Array, num_rows: int) -> int | None:
    """Bisects on slices, because Arrow compares lists as wholes only; costs about one pass."""
    low, high = 0, num_rows
    if a.slice(0, high).equals(b.slice(0, high)):
        return None
    while high - low > 1:  # the first difference lies in [low, high)
        middle = (low + high) // 2
        if a.slice(low, middle - low).equals(b.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """One plain array: neither chunks nor a dictionary's order are content."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _digest_array(digest: Any, array: pa.Array) -> None:
    """Feed presence, lengths and values; memory under a null and offsets of a slice do not count."""
    digest.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if pa.types.is_list(array.type):
        _digest_array(digest, array.value_lengths().fill_null(0))
        _digest_array(digest, array.flatten())
    elif pa.types.is_string(array.type):
        digest.update(json.dumps(array.to_pylist()).encode())
    else:
        digest.update(array.fill_null(0).to_numpy(zero_copy_only=False).tobytes())
