"""Mooncake traces (FAST'25 release): JSON lines with ids for every 512-token block of the prompt.

``timestamp`` (milliseconds from the trace's start), ``input_length``, ``output_length`` and ``hash_ids``, one
id a block, the partial last block included; an id fixes its whole prefix. Source:
github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pagedserve.traces.rows import MAX_INT64, FieldError, NumberedLines, RowsState
from pagedserve.traces.trace import MAX_TOKENS_PER_ROW

BLOCK_SIZE = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
NS_PER_MS = 1_000_000


def parse(lines: NumberedLines, rows: RowsState) -> None:
    """Read every row; fields beyond the four are ignored and noted."""
    rows.block_size, rows.block_field = BLOCK_SIZE, "hash_ids"
    rows.arrival_field, rows.output_field = "timestamp", "output_length"
    extra: dict[str, None] = {}
    for line, text in lines:
        try:
            fields = _object(text)
            arrival_ns = _whole(fields, "timestamp", 0, MAX_INT64 // NS_PER_MS) * NS_PER_MS
            num_prompt = _whole(fields, "input_length", 1, MAX_TOKENS_PER_ROW)
            num_output = _whole(fields, "output_length", 0, MAX_TOKENS_PER_ROW)
            ids = _block_ids(fields, num_prompt)
        except FieldError as error:
            rows.reject(line, error)
        else:
            rows.add(line, arrival_ns, num_prompt, num_output)
            rows.add_blocks(ids)
            if len(fields) > len(FIELDS):
                extra |= dict.fromkeys(name for name in fields if name not in FIELDS)
    if extra:
        rows.notes.append(f"fields ignored: {', '.join(extra)}")


def recognises(head: Sequence[str]) -> bool:
    """Whether the first line is an object of exactly Mooncake's fields and types."""
    try:
        fields = _object(head[0])
        _whole(fields, "timestamp", 0, MAX_INT64)
    except FieldError:
        return False
    return set(fields) == set(FIELDS) and isinstance(fields["hash_ids"], list)


def _object(text: str) -> dict[str, Any]:
    if not text:
        raise FieldError("row", "", "is an empty line between rows")
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except FieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise FieldError("row", text, "is not JSON") from error
    if not isinstance(value, dict):
        raise FieldError("row", text, "is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object none of whose names occurs twice: which value would be meant?"""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise FieldError("row", f"fields {', '.join(name for name, _ in pairs)}", "names a field twice")
    return fields


def _whole(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    """An integer field; JSON's 1.0, true and "1" are not integers."""
    value = _field(fields, name)
    if type(value) is not int:
        raise FieldError(name, value, "is not an integer")
    if not low <= value <= high:
        raise FieldError(name, value, f"is outside {low}..{high}")
    return value


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise FieldError(name, f"fields {', '.join(fields)}", "is missing")
    return fields[name]


def _block_ids(fields: dict[str, Any], num_prompt: int) -> list[int]:
    ids = _field(fields, "hash_ids")
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise FieldError("hash_ids", ids, "is not a list of integers")
    if len(ids) != -(-num_prompt // BLOCK_SIZE):
        found = f"{len(ids)} ids for {num_prompt} tokens"
        raise FieldError("hash_ids", found, f"does not have one id for every {BLOCK_SIZE} tokens, rounded up")
    if min(ids) < 0 or max(ids) > MAX_INT64:
        raise FieldError("hash_ids", ids, f"has an id outside 0..{MAX_INT64}")
    return ids
