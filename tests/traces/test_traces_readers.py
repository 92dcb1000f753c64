"""Azure formats, detection, and what all readers share: lines, drops, order, gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedserve.traces.readers import TraceFormat, format_names, read_trace, register, trace_formats
from pagedserve.traces.report import TraceError
from pagedserve.traces.rows import FieldError, split_csv

Write = Callable[..., Path]
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROWS = [
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:50.9951690,879,55",
]


def azure(*rows: str, end: str = "\r\n") -> str:
    return HEADER + end.join(rows)


def test_azure2023_crlf_without_final_newline(write: Write) -> None:
    trace = read_trace(write(azure(*ROWS)), format="azure2023")
    assert trace.arrival_ns.tolist() == [0, 4_314_579_000, 4_314_579_000]
    assert trace.num_prompt_tokens.tolist() == [374, 396, 879]
    assert trace.num_output_tokens.tolist() == [44, 109, 55]
    assert trace.row.tolist() == [1, 2, 3]
    assert trace.name == "trace"
    assert (trace.report.num_rows_read, trace.report.num_rows_kept, trace.report.tallies) == (3, 3, ())
    assert trace.report.origin_ns == 1_700_158_546_680_590_000  # 2023-11-16T18:15:46.68059Z


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\r\n",
        lambda text: text + "\r\n\r\n  \r\n",
        lambda text: text.replace("\r\n", "\n"),
        lambda text: "\ufeff" + text,
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text[:60].encode()) + gzip.compress(text[60:].encode()),
    ],
    ids=["final newline", "blank lines at the end", "LF", "byte-order mark", "gzip", "two gzip members"],
)
def test_the_same_rows_in_another_wrapping(write: Write, change: Callable[[str], str | bytes]) -> None:
    plain = read_trace(write(azure(*ROWS)))
    wrapped = read_trace(write(change(azure(*ROWS)), "wrapped.dat"))
    assert wrapped.sha256() == plain.sha256()
    assert wrapped.report.num_rows_read == 3


def test_fractions_are_exact_to_the_nanosecond(write: Write) -> None:
    rows = [
        "2023-11-16 00:00:00.0000001,1,1",
        "2023-11-16 00:00:00.0000002,1,1",
        "2023-11-16 00:00:00.123456789,1,1",
        "2023-11-16 00:00:01,1,1",
    ]
    trace = read_trace(write(azure(*rows)), format="azure2023")
    assert trace.arrival_ns.tolist() == [0, 100, 123_456_689, 999_999_900]


def test_azure2024_zone_and_missing_fraction(write: Write) -> None:
    rows = [
        "2024-05-12 23:59:59.999999+00:00,10,1",
        "2024-05-13 00:00:00+00:00,20,2",
        "2024-05-13 02:00:00.5+02:00,30,3",
        "2024-05-12 20:30:01-03:30,40,4",
    ]
    trace = read_trace(write(azure(*rows)))
    assert trace.report.format == "azure2024"
    assert trace.arrival_ns.tolist() == [0, 1000, 500_001_000, 1_000_001_000]


def test_columns_by_name_and_extra_columns_noted(write: Write) -> None:
    text = 'GeneratedTokens,TIMESTAMP,Model,ContextTokens\n7,2023-11-16 18:15:46,"a,b",9\n'
    trace = read_trace(write(text))
    assert (trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist()) == ([9], [7])
    assert trace.report.notes == ("columns ignored: Model",)


BAD_AZURE_ROWS = [
    ("2023-11-16 18:15:47,12.0,5", "ContextTokens", "12.0"),
    ("2023-11-16 18:15:47,-3,5", "ContextTokens", "-3"),
    ("2023-11-16 18:15:47,0,5", "ContextTokens", "0"),
    ("2023-11-16 18:15:47,,5", "ContextTokens", ""),
    ("2023-11-16 18:15:47,1_000,5", "ContextTokens", "1_000"),
    ("2023-11-16 18:15:47,٣,5", "ContextTokens", "٣"),
    ("2023-11-16 18:15:47,5, 7", "GeneratedTokens", " 7"),
    ("2023-11-16 18:15:47,5,-1", "GeneratedTokens", "-1"),
    ("2023-11-16 18:15:47,5,true", "GeneratedTokens", "true"),
    ("2023-11-16 18:15:47,5,99999999999999999999999", "GeneratedTokens", "99999999999999999999999"),
    ("2023-11-16 18:15:47,5,2147483648", "GeneratedTokens", "2147483648"),
    ("2023-11-16T18:15:47,5,5", "TIMESTAMP", "2023-11-16T18:15:47"),
    ("2023-11-16 18:15:47.1234567890,5,5", "TIMESTAMP", "2023-11-16 18:15:47.1234567890"),
    ("2023-11-16 18:15:47+00:00,5,5", "TIMESTAMP", "2023-11-16 18:15:47+00:00"),
    ("2023-11-16 24:15:47,5,5", "TIMESTAMP", "2023-11-16 24:15:47"),
    ("2023-02-29 18:15:47,5,5", "TIMESTAMP", "2023-02-29"),
    ("0999-02-01 18:15:47,5,5", "TIMESTAMP", "0999-02-01"),
    ("2023-11-16 18:15:47,5", "row", "2023-11-16 18:15:47,5"),
    ("2023-11-16 18:15:47,5,5,5", "row", "2023-11-16 18:15:47,5,5,5"),
    ('2023-11-16 18:15:47,"5,5', "row", '2023-11-16 18:15:47,"5,5'),
    ("", "row", ""),
    (HEADER.strip(), "TIMESTAMP", "TIMESTAMP"),
]


@pytest.mark.parametrize(("row", "field", "value"), BAD_AZURE_ROWS)
def test_a_bad_row_is_an_error_with_its_place_or_a_counted_drop(
    write: Write, row: str, field: str, value: str
) -> None:
    path = write(azure(ROWS[0], row, ROWS[1]))
    with pytest.raises(TraceError) as raised:
        read_trace(path, format="azure2023")
    message = str(raised.value)
    assert message.startswith(f"trace.csv line 3: {field} ")
    assert repr(value) in message

    trace = read_trace(path, format="azure2023", on_error="drop")
    assert trace.row.tolist() == [1, 3]
    assert (trace.report.num_rows_read, trace.report.num_rows_kept, trace.report.count("dropped")) == (
        3,
        2,
        1,
    )
    (tally,) = trace.report.tallies
    assert tally.reason.startswith(field)
    (example,) = tally.examples
    assert (example.file, example.line, example.row, example.field) == ("trace.csv", 3, 2, field)
    assert example.value == repr(value)


def test_bytes_that_are_not_utf8_spoil_only_their_row(write: Write) -> None:
    path = write(azure(*ROWS[:2]).encode() + b"\r\n2023-11-16 18:15:51,\xff\xfe,5")
    with pytest.raises(TraceError, match="line 4: ContextTokens"):
        read_trace(path)
    assert read_trace(path, on_error="drop").report.count("dropped") == 1


def test_drops_are_counted_in_full_and_shown_by_reason(write: Write) -> None:
    bad = ["2023-11-16 18:15:47,x,5"] * 5 + ["2023-11-16 18:15:47,5,y"]
    trace = read_trace(write(azure(ROWS[0], *bad)), on_error="drop")
    dropped = {tally.reason.split()[0]: tally for tally in trace.report.tallies}
    assert {field: tally.count for field, tally in dropped.items()} == {
        "ContextTokens": 5,
        "GeneratedTokens": 1,
    }
    assert [example.line for example in dropped["ContextTokens"].examples] == [3, 4, 5]
    assert any(line.startswith("5 dropped: ContextTokens") for line in trace.report.lines())


def test_report_and_summary_are_plain_values(write: Write) -> None:
    trace = read_trace(write(azure(*ROWS, "2023-11-16 18:15:52,x,5")), on_error="drop")
    report = json.loads(json.dumps(trace.report.as_dict()))
    assert (report["num_rows_kept"], report["tallies"][0]["examples"][0]["line"]) == (3, 5)
    assert json.loads(json.dumps(trace.describe().as_dict()))["prompt"]["max"] == 879


def test_zero_output_becomes_one_token_and_is_counted(write: Write) -> None:
    trace = read_trace(write(azure(ROWS[0], "2023-11-16 18:15:47,5,0")))
    assert trace.num_output_tokens.tolist() == [44, 1]
    (tally,) = trace.report.tallies
    assert (tally.kind, tally.count) == ("changed", 1)
    assert (tally.examples[0].line, tally.examples[0].field) == (3, "GeneratedTokens")


def test_rows_out_of_order_are_sorted_stably_and_counted(write: Write) -> None:
    rows = [
        "2023-11-16 10:00:05,1,1",
        "2023-11-16 10:00:09,2,1",
        "2023-11-16 10:00:05,3,1",
        "2023-11-16 10:00:07,4,1",
        "2023-11-16 10:00:09,5,1",
    ]
    trace = read_trace(write(azure(*rows)))
    assert trace.row.tolist() == [1, 3, 4, 2, 5]
    assert trace.num_prompt_tokens.tolist() == [1, 3, 4, 2, 5]
    (tally,) = trace.report.tallies
    assert (tally.kind, tally.count) == ("reordered", 2)
    assert [(example.line, example.field) for example in tally.examples] == [
        (4, "TIMESTAMP"),
        (5, "TIMESTAMP"),
    ]


def test_many_rows_of_one_instant_keep_their_order(write: Write) -> None:
    seconds = [i * 7919 % 10 for i in range(1000)]
    trace = read_trace(write(azure(*(f"2023-11-16 10:00:0{second},5,5" for second in seconds))))
    assert trace.row.tolist() == [i + 1 for i in sorted(range(1000), key=lambda i: seconds[i])]


def test_duplicate_rows_are_kept(write: Write) -> None:
    assert len(read_trace(write(azure(ROWS[0], ROWS[0], ROWS[0])))) == 3


def test_detection_says_what_it_found(write: Write) -> None:
    assert read_trace(write(azure(*ROWS))).report.lines()[0] == (
        "trace.csv: format azure2023 (detected), 3 rows read, 3 kept"
    )
    assert not read_trace(write(azure(*ROWS)), format="azure2023").report.detected


def test_detection_refuses_what_fits_two_formats_or_none(write: Write) -> None:
    with pytest.raises(TraceError, match=r"more than one.*azure2023.*azure2024"):
        read_trace(write(HEADER))
    with pytest.raises(TraceError, match=r"no trace format.*'a,b'.*azure2023.*azure2024.*mooncake.*native"):
        read_trace(write("a,b\n1,2\n"))
    with pytest.raises(TraceError, match="no trace format"):  # Azure 2025: NumImages and ISO dates
        read_trace(
            write("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,0,7,4\n")
        )
    with pytest.raises(TraceError, match=r"'azure'; choose one of azure2023, azure2024, mooncake, native"):
        read_trace(write(azure(*ROWS)), format="azure")


def test_a_wrong_header_is_an_error_even_when_dropping(write: Write) -> None:
    with pytest.raises(
        TraceError, match=r"line 1: the header lacks GeneratedTokens; it has TIMESTAMP, Context"
    ):
        read_trace(write("TIMESTAMP,ContextTokens\n"), format="azure2023", on_error="drop")
    with pytest.raises(TraceError, match=r"names 'TIMESTAMP' more than once"):
        read_trace(write("TIMESTAMP,TIMESTAMP,ContextTokens,GeneratedTokens\n"), format="azure2023")


def test_empty_missing_and_damaged_files(write: Write, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"empty\.csv is empty"):
        read_trace(write("\r\n\r\n", "empty.csv"))
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing.csv")
    packed = gzip.compress(azure(*ROWS * 500).encode())
    with pytest.raises(TraceError, match=r"cut\.csv\.gz: the gzip stream is damaged after line \d+"):
        read_trace(write(packed[: len(packed) // 2], "cut.csv.gz"), format="azure2023", on_error="drop")
    with pytest.raises(ValueError, match="on_error"):
        read_trace(write(azure(*ROWS)), on_error="ignore")  # pyright: ignore[reportArgumentType]


def test_a_header_alone_is_an_empty_trace(write: Write) -> None:
    trace = read_trace(write(HEADER), format="azure2024")
    assert len(trace) == 0
    assert trace.describe().rate_per_s is None


def test_a_further_format_is_one_registration(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(lines, rows) -> None:
        for line, text in lines:
            arrival, prompt, output = map(int, text.split())
            rows.add(line, arrival, prompt, output)

    monkeypatch.setattr(
        "pagedserve.traces.readers._FORMATS", {known.name: known for known in trace_formats()}
    )
    register(TraceFormat("spaced", "three integers", lambda head: head[0].count(" ") == 2, parse, True, True))
    assert format_names()[-1] == "spaced"
    assert read_trace(write("5 1 1\n7 2 2\n")).arrival_ns.tolist() == [0, 2]
    with pytest.raises(ValueError, match="'spaced' is registered already"):
        register(trace_formats()[-1])


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("a,b", ["a", "b"]),
        ('"a,b","c""d"', ["a,b", 'c"d']),
        ('"",x,""', ["", "x", ""]),
        (',"x",', ["", "x", ""]),
    ],
)
def test_split_csv(line: str, fields: list[str]) -> None:
    assert split_csv(line) == fields


@pytest.mark.parametrize("line", ['a"b', '"a"b', '"a', 'a,"b"c,d'])
def test_split_csv_refuses_stray_quotes(line: str) -> None:
    with pytest.raises(FieldError, match="quote"):
        split_csv(line)
