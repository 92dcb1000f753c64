"""The native CSV: what is written is read back exactly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.traces.blocks import BlockIds
from pagedserve.traces.readers import read_trace, write_trace
from pagedserve.traces.report import TraceError
from pagedserve.traces.trace import Trace

Write = Callable[..., Path]
LABEL = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    size = draw(st.integers(0, 12))

    def column(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=size, max_size=size))

    block_size = draw(st.none() | st.integers(1, 600))
    prompts = column(1, 2**31 - 1 if block_size is None else 4 * block_size)
    more: dict[str, Any] = {"row": column(1, 2**40)}
    for name in ("tenant", "session"):
        if draw(st.booleans()):
            more[name] = draw(st.lists(LABEL, min_size=size, max_size=size))
    if draw(st.booleans()):
        more["priority"] = column(-(2**63), 2**63 - 1)
    if block_size is not None:
        counts = [-(-prompt // block_size) for prompt in prompts]
        # Prompts share a chain of 4 ids in some cases and have their own in others.
        own = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        ids = [
            2**62 + position if not own[index] else index * 4 + position
            for index, count in enumerate(counts)
            for position in range(count)
        ]
        more["blocks"] = BlockIds(block_size, np.array(ids, dtype=np.int64), np.cumsum([0, *counts]))
    arrivals = sorted(column(0, 2**63 - 1))
    return Trace.of("drawn", arrivals, prompts, column(1, 2**31 - 1), **more)


@given(traces(), st.sampled_from(["a.csv", "a.csv.gz"]))
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact(trace: Trace, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write_trace(trace, path)
        again = read_trace(path, format="native")
        detected = read_trace(path)
        first_bytes = path.read_bytes()
        write_trace(again, path)
        assert path.read_bytes() == first_bytes
    assert detected.report.format == "native"
    assert again.sha256() == trace.sha256()
    assert again.report.tallies == ()
    for column in (
        "arrival_ns",
        "num_prompt_tokens",
        "num_output_tokens",
        "row",
        "tenant",
        "session",
        "priority",
    ):
        mine, theirs = getattr(trace, column), getattr(again, column)
        assert (mine is None) == (theirs is None), column
        if mine is not None:
            assert mine.tolist() == theirs.tolist(), column
    if trace.blocks is not None:
        assert again.blocks is not None
        assert again.blocks.block_size == trace.blocks.block_size
        assert again.blocks.ids.tolist() == trace.blocks.ids.tolist()
        assert again.blocks.offsets.tolist() == trace.blocks.offsets.tolist()


def test_the_format_as_documented(write: Write) -> None:
    text = (
        "arrival_ns,num_prompt_tokens,num_output_tokens,row,priority,tenant,session,block_ids_16\n"
        '5,33,7,3,-1,"a, ""b""",,0 1 2\n'
        "5,16,1,4,0,c,s1,0\n"
    )
    trace = read_trace(write(text))
    assert trace.report.format == "native"
    assert trace.arrival_ns.tolist() == [5, 5]  # kept: the native clock is not moved to start at 0
    assert trace.tenant is not None
    assert trace.tenant.tolist() == ['a, "b"', "c"]
    assert trace.row.tolist() == [3, 4]
    path = write("", "out.csv")
    write_trace(trace, path)
    assert path.read_text() == text


def test_a_gzip_file_holds_neither_its_name_nor_the_time(tmp_path: Path) -> None:
    write_trace(Trace.of("t", [0], [1], [1]), tmp_path / "t.csv.gz")
    header = (tmp_path / "t.csv.gz").read_bytes()[:10]
    assert header[3] == 0  # no flags, so no name
    assert header[4:8] == bytes(4)  # no time


def test_three_columns_are_enough_in_any_order(write: Write) -> None:
    trace = read_trace(
        write("num_output_tokens,arrival_ns,colour,num_prompt_tokens\n2,10,red,3\n4,20,blue,5\n")
    )
    assert trace.num_prompt_tokens.tolist() == [3, 5]
    assert trace.row.tolist() == [1, 2]
    assert trace.blocks is None
    assert trace.report.notes == ("columns ignored: colour",)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("-1,5,5,0", "arrival_ns"),
        ("1.5,5,5,0", "arrival_ns"),
        (f"{2**63},5,5,0", "arrival_ns"),
        ("1,5,5,0  1", "block_ids_4"),
        ("1,5,5,0", "block_ids_4"),
        ("1,5,5,0 1 2", "block_ids_4"),
        ("1,5,5,", "block_ids_4"),
        ("1,5,5,0 -1", "block_ids_4"),
        (f"1,5,5,0 {2**63}", "block_ids_4"),
        ("1,5,5,0 2", "block_ids_4"),  # 2 follows 1 in the first row
        ("1,0,5,", "num_prompt_tokens"),
    ],
)
def test_bad_rows_name_their_field(write: Write, row: str, field: str) -> None:
    path = write(f"arrival_ns,num_prompt_tokens,num_output_tokens,block_ids_4\n0,9,5,0 1 2\n{row}\n")
    with pytest.raises(TraceError, match=rf"line 3: {field} "):
        read_trace(path)
    trace = read_trace(path, on_error="drop")
    assert (len(trace), trace.report.count("dropped")) == (1, 1)


def test_one_column_of_block_ids(write: Write) -> None:
    header = "arrival_ns,num_prompt_tokens,num_output_tokens,block_ids_4,block_ids_8\n"
    with pytest.raises(TraceError, match="one column of block ids"):
        read_trace(write(header))
