"""Mooncake: block ids, JSON types, the chain rule and clocks that start over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedserve.traces.readers import read_trace
from pagedserve.traces.report import TraceError

Write = Callable[..., Path]


def row(timestamp: Any = 0, prompt: Any = 600, output: Any = 5, ids: Any = (0, 1), **more: Any) -> str:
    ids = list(ids) if isinstance(ids, tuple) else ids
    fields = {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": ids}
    return json.dumps(fields | more)


def at(*timestamps: int) -> str:
    return "\n".join(row(timestamp) for timestamp in timestamps)


def test_rows_and_block_ids(write: Write) -> None:
    lines = [row(27_482, 1024, 52, (0, 1)), row(30_535, 1025, 26, (0, 1, 2)), row(30_535, 13, 1, (3,))]
    trace = read_trace(write("\n".join(lines), "m.jsonl"))
    assert trace.report.format == "mooncake"
    assert trace.arrival_ns.tolist() == [0, 3_053_000_000, 3_053_000_000]
    assert trace.report.origin_ns == 27_482_000_000
    assert trace.blocks is not None
    assert trace.blocks.block_size == 512
    assert [trace.blocks.of(i).tolist() for i in range(3)] == [[0, 1], [0, 1, 2], [3]]


def test_identical_rows_are_both_kept(write: Write) -> None:
    trace = read_trace(write(row() + "\n" + row()))
    assert len(trace) == 2
    prefix = trace.describe().prefix
    assert prefix is not None
    # The second row hits its partial last block too: the whole prompt is identical.
    assert (prefix.num_hit_blocks, prefix.num_blocks, prefix.num_hit_tokens) == (2, 4, 600)


BAD_ROWS = [
    (row(timestamp=1.0), "timestamp"),
    (row(timestamp="7"), "timestamp"),
    (row(timestamp=True), "timestamp"),
    (row(timestamp=-1), "timestamp"),
    (row(timestamp=10**15), "timestamp"),
    (row(prompt=0, ids=()), "input_length"),
    (row(prompt=-5), "input_length"),
    (row(prompt=600.5), "input_length"),
    (row(prompt=None), "input_length"),
    (row(output=-1), "output_length"),
    (row(output=False), "output_length"),
    (row(ids=(0,)), "hash_ids"),
    (row(ids=(0, 1, 2)), "hash_ids"),
    (row(prompt=512), "hash_ids"),
    (row(ids=(0, 1.0)), "hash_ids"),
    (row(ids=(0, True)), "hash_ids"),
    (row(ids=(0, "1")), "hash_ids"),
    (row(ids=(0, -1)), "hash_ids"),
    (row(ids=(0, 2**63)), "hash_ids"),
    (row(ids={"sys_prompt": [0, 1]}), "hash_ids"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "hash_ids"),
    ('{"timestamp": 0, "timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "row"),
    ('{"timestamp": 0, "input_length": 5', "row"),
    ("[1, 2]", "row"),
    ("[" * 100_000, "row"),
    ("", "row"),
]


@pytest.mark.parametrize(("bad", "field"), BAD_ROWS)
def test_a_bad_row_is_an_error_with_its_place_or_a_counted_drop(write: Write, bad: str, field: str) -> None:
    path = write("\n".join([row(0), bad, row(1)]), "m.jsonl")
    with pytest.raises(TraceError, match=rf"^m\.jsonl line 2: {field} "):
        read_trace(path, format="mooncake")
    trace = read_trace(path, format="mooncake", on_error="drop")
    assert trace.row.tolist() == [1, 3]
    (tally,) = trace.report.tallies
    assert (tally.kind, tally.count, tally.examples[0].line) == ("dropped", 1, 2)
    assert tally.examples[0].field == field


def test_extra_fields_are_noted_but_not_detected(write: Write) -> None:
    path = write(row(chat_id=3))
    assert read_trace(path, format="mooncake").report.notes == ("fields ignored: chat_id",)
    with pytest.raises(TraceError, match="fits no trace format"):
        read_trace(path)


def test_other_json_lines_are_not_taken_for_mooncake(write: Write) -> None:
    for other in (row(timestamp="12"), row(ids={"sys_prompt": [0]}), row(timestamp=1.5)):
        with pytest.raises(TraceError, match="fits no trace format"):
            read_trace(write(other))


def test_an_id_must_fix_its_prefix(write: Write) -> None:
    lines = [
        row(0, 1030, 1, (0, 1, 2)),
        row(1, 600, 1, (0, 3)),
        row(2, 1030, 1, (0, 3, 2)),
        row(3, 600, 1, (3, 4)),
    ]
    path = write("\n".join(lines))
    with pytest.raises(TraceError, match=r"line 3: hash_ids has an id that follows another id.*found 'id 2'"):
        read_trace(path)
    trace = read_trace(path, on_error="drop")
    assert trace.row.tolist() == [1, 2]
    assert trace.report.count("dropped") == 2


def test_a_dropped_first_row_does_not_hold_the_origin(write: Write) -> None:
    trace = read_trace(write(row(5, ids=(0,)) + "\n" + row(9)), format="mooncake", on_error="drop")
    assert trace.arrival_ns.tolist() == [0]
    assert trace.report.origin_ns == 9_000_000


@pytest.mark.parametrize(
    "times",
    [
        (0, 1000, 2000, 0, 500, 3000),
        (0, 1000, 2000, 50, 1000, 2000),
        (*range(500), *range(300)),
        (*range(500), *range(3, 100), 0, 1, 2, 3),
    ],
)
def test_a_clock_that_starts_over_is_an_error(write: Write, times: tuple[int, ...]) -> None:
    line = next(i for i in range(1, len(times)) if times[i] < times[i - 1]) + 1
    for on_error in ("raise", "drop"):
        with pytest.raises(TraceError, match=rf"line {line}: .*the clock starts over.*Split the file there"):
            read_trace(write(at(*times)), format="mooncake", on_error=on_error)


@pytest.mark.parametrize(
    ("times", "num_late"),
    [
        ((0, 1000, 500, 2000), 1),
        ((0, 1000, 0, 2000), 1),
        ((1000, 0, 2000), 1),
        ((3000, 4000, 1000, 2000), 2),
        ((0, 2, 1, 4, 3, 6, 5, 8, 7), 4),
        (tuple((i * 7919) % 1000 for i in range(1000)), None),
    ],
)
def test_disorder_is_not_taken_for_a_clock_that_starts_over(
    write: Write, times: tuple[int, ...], num_late: int | None
) -> None:
    trace = read_trace(write(at(*times)), format="mooncake")
    expected = [t - min(times) for t in sorted(times)]
    assert (trace.arrival_ns // 1_000_000).tolist() == expected
    late = sum(time < max(times[: i + 1]) for i, time in enumerate(times))
    assert trace.report.count("reordered") == late
    assert num_late in (None, late)
