import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from metrics_hand_records import hand_record, header
from metrics_toy_runs import toy_record

from pagedserve.metrics import files
from pagedserve.metrics.identity import first_difference
from pagedserve.metrics.record import RecordError, RunRecord, build_table
from pagedserve.metrics.record_tables import FORMAT_VERSION, SCHEMAS, SINCE_VERSION_3, TABLES


@pytest.fixture
def record() -> RunRecord:
    return hand_record(
        [{"commit_ns": 10, "num_decode_tokens": 1, "plan_digest": -(2**63)}],
        [
            {"request": 7, "num_output_tokens": 1, "prefix_keys": [3, 2**40], "finish_ns": 10},
            {"request": 8, "finish_reason": "refused", "error": "prompt of 99 tokens, limit 64"},
        ],
        [(7, 0, 1)],
        calls=[("add", 7, 0), ("schedule", None, 3)],
        plans=[{"step": 0, "joined": [7], "block_ids": [4, 5]}],
    )


def test_what_is_saved_is_read_back(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path / "deep" / "run")
    loaded = RunRecord.load(tmp_path / "deep" / "run")
    assert first_difference(record, loaded) is None
    assert loaded.header == record.header
    for name, table in loaded.tables().items():
        assert table.schema.equals(SCHEMAS[name]), name
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["simulated", "client"])
def test_a_record_from_before_swaps_is_read_as_one_without(
    kind: str, record: RunRecord, tmp_path: Path
) -> None:
    record.save(tmp_path)
    for name, columns in SINCE_VERSION_3.items():
        rewritten(name, lambda table, columns=columns: table.drop_columns(list(columns)))(tmp_path)
    header_with("kind", kind)(tmp_path)
    with pytest.raises(RecordError, match=r"steps.parquet: missing columns num_blocks_swapped_out"):
        RunRecord.load(tmp_path)
    (tmp_path / "header.json").write_text(json.dumps({**header(kind=kind), "format_version": 2}))
    loaded = RunRecord.load(tmp_path)
    assert loaded.header["format_version"] == FORMAT_VERSION
    none = None if kind == "client" else 0
    assert loaded.steps.column("num_blocks_swapped_in").to_pylist() == [none]
    assert loaded.plans is not None
    assert loaded.plans.column("out_blocks").to_pylist() == [[]]


def test_plans_are_optional(record: RunRecord, tmp_path: Path) -> None:
    RunRecord(record.header, record.steps, record.requests, record.emissions, record.calls).save(tmp_path)
    assert not (tmp_path / "plans.parquet").exists()
    assert RunRecord.load(tmp_path).plans is None


def test_a_record_without_a_single_row_survives(tmp_path: Path) -> None:
    empty = hand_record([], [], [])
    empty.save(tmp_path)
    assert first_difference(empty, RunRecord.load(tmp_path)) is None


def test_a_folder_named_like_a_partition_adds_no_column(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path / "step=3")
    assert RunRecord.load(tmp_path / "step=3").array("steps", "step").tolist() == [0]


def rewritten(name: str, change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / f"{name}.parquet"
        pq.write_table(change(pq.read_table(path)), path)

    return spoil


def header_with(key: str, value: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "header.json").write_text(json.dumps({**header(), key: value}))


def retyped(table: pa.Table, column: str, to: pa.DataType) -> pa.Table:
    place = table.schema.get_field_index(column)
    return table.set_column(place, column, table.column(column).cast(to))


def filled(table: pa.Table, column: str, values: list[object]) -> pa.Table:
    place = table.schema.get_field_index(column)
    return table.set_column(place, column, pa.array(values, table.schema.field(column).type))


REFUSALS = {
    "unknown version": (
        header_with("format_version", 4),
        "header.json",
        ["format_version", "(1, 2, 3)", "found 4"],
    ),
    "version as text": (header_with("format_version", "1"), "header.json", ["expected one of", "found '1'"]),
    "wrong header type": (header_with("limits", [1]), "header.json", ["key limits", "dict", "[1]"]),
    "a number for a bool": (header_with("seed", True), "header.json", ["key seed", "int", "True"]),
    "unknown kind": (header_with("kind", "dreamt"), "header.json", ["key kind", "simulated, live", "dreamt"]),
    "not JSON": (lambda f: (f / "header.json").write_text("{"), "header.json", ["expected JSON"]),
    "no header": (lambda f: (f / "header.json").unlink(), "header.json", ["expected the header", "nothing"]),
    "no table": (lambda f: (f / "calls.parquet").unlink(), "calls.parquet", ["table calls", "nothing"]),
    "not Parquet": (lambda f: (f / "steps.parquet").write_text("step\n"), "steps.parquet", ["Parquet file"]),
    "missing column": (
        rewritten("steps", lambda t: t.drop_columns(["num_wasted_slots"])),
        "steps.parquet",
        ["missing columns num_wasted_slots"],
    ),
    "extra column": (
        rewritten("emissions", lambda t: t.append_column("mood", t.column("request"))),
        "emissions.parquet",
        ["unknown columns mood"],
    ),
    "wrong dtype": (
        rewritten("steps", lambda t: retyped(t, "num_running", pa.int64())),
        "steps.parquet",
        ["column num_running", "expected int32", "found int64"],
    ),
    "float time": (
        rewritten("calls", lambda t: retyped(t, "now_ns", pa.float64())),
        "calls.parquet",
        ["column now_ns", "expected int64", "found double"],
    ),
    "null where none may be": (
        rewritten("steps", lambda t: filled(t, "commit_ns", [None])),
        "steps",
        ["column commit_ns", "no nulls", "found 1"],
    ),
    "unknown finish reason": (
        rewritten("requests", lambda t: filled(t, "finish_reason", ["length", "bored"])),
        "requests",
        ["column finish_reason", "timeout", "bored"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_the_reader_refuses_and_says_why(case: str, record: RunRecord, tmp_path: Path) -> None:
    spoil, file, words = REFUSALS[case]
    record.save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(RecordError) as refusal:
        RunRecord.load(tmp_path)
    message = str(refusal.value)
    assert message.count("\n") == 0
    for word in [str(tmp_path), file, *words]:
        assert word in message


def test_a_missing_header_key_is_named(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path)
    short = {key: value for key, value in record.header.items() if key != "trace"}
    (tmp_path / "header.json").write_text(json.dumps(short))
    with pytest.raises(RecordError, match="key trace is missing"):
        RunRecord.load(tmp_path)


def test_no_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"gone: expected the folder of a run record, found nothing"):
        RunRecord.load(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="found a file"):
        RunRecord.load(tmp_path / "file")


def test_a_used_folder_is_only_overwritten_on_request(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path / "run")
    other = hand_record([], [], [])
    with pytest.raises(RecordError, match="not empty"):
        other.save(tmp_path / "run")
    assert first_difference(record, RunRecord.load(tmp_path / "run")) is None
    other.save(tmp_path / "run", overwrite=True)
    assert first_difference(other, RunRecord.load(tmp_path / "run")) is None
    assert not (tmp_path / "run" / "plans.parquet").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_overwrite_never_deletes_what_is_not_a_record(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match=r"also holds notes\.txt"):
        record.save(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    with pytest.raises(RecordError, match="a file has this name"):
        record.save(tmp_path / "run" / "notes.txt", overwrite=True)


def test_a_write_that_fails_half_way_leaves_the_old_record(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.save(tmp_path / "run")

    def full_disk(table: pa.Table, path: Path, **options: object) -> None:
        path.write_bytes(b"half a table")
        raise OSError("no space left")

    monkeypatch.setattr(files.pq, "write_table", full_disk)
    with pytest.raises(OSError, match="no space left"):
        hand_record([], [], []).save(tmp_path / "run", overwrite=True)
    monkeypatch.undo()
    assert first_difference(record, RunRecord.load(tmp_path / "run")) is None
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_swap_that_fails_puts_the_old_record_back(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.save(tmp_path / "run")
    rename = Path.rename

    def refuses_the_new_one(path: Path, target: Path) -> Path:
        if ".writing-" in path.name:
            raise PermissionError("not now")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses_the_new_one)
    with pytest.raises(PermissionError, match="not now"):
        hand_record([], [], []).save(tmp_path / "run", overwrite=True)
    monkeypatch.undo()
    assert first_difference(record, RunRecord.load(tmp_path / "run")) is None
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_build_table_converts_and_names_what_does_not_fit() -> None:
    good = {"request": [1], "first_step": np.array([0], np.int32), "num_steps": (2,)}
    assert build_table("emissions", good).schema.equals(SCHEMAS["emissions"])
    with pytest.raises(RecordError, match="missing columns num_steps"):
        build_table("emissions", {"request": [1], "first_step": [0]})
    with pytest.raises(RecordError, match="column first_step: expected int64"):
        build_table("emissions", {**good, "first_step": [0.5]})
    with pytest.raises(RecordError, match="column request: expected no nulls, found 1"):
        build_table("emissions", {**good, "request": [None]})
    with pytest.raises(RecordError, match="differ in length"):
        build_table("emissions", {**good, "request": [1, 2]})
    steps = {column.name: [0] for column in TABLES["steps"]}
    with pytest.raises(RecordError, match=r"column num_running: expected int32.*2147483648"):
        build_table("steps", {**steps, "num_running": np.array([2**31])})


def test_text_columns_take_numpy_arrays() -> None:
    table = build_table(
        "calls", {"kind": np.array(["add", "commit"]), "subject": [1, None], "now_ns": [0, 1]}
    )
    assert table.column("kind").to_pylist() == ["add", "commit"]


def test_a_header_that_is_not_json_is_refused_in_memory() -> None:
    with pytest.raises(RecordError, match="header: not JSON"):
        hand_record([], [], [], policy={"victim": object()})
    with pytest.raises(RecordError, match="header: not JSON"):
        hand_record([], [], [], counters={"rate": float("nan")})


def test_arrays_are_exact_and_nulls_are_apart(record: RunRecord) -> None:
    assert record.array("steps", "plan_digest").tolist() == [-(2**63)]
    values, present = record.nullable_array("requests", "finish_ns")
    assert (values.tolist(), present.tolist()) == ([10, 0], [True, False])
    with pytest.raises(RecordError, match="column finish_ns holds 1 nulls"):
        record.array("requests", "finish_ns")


def test_every_column_says_what_it_means() -> None:
    for name, columns in TABLES.items():
        assert [c.name for c in columns] == SCHEMAS[name].names
        assert all(len(c.meaning) > 3 for c in columns)


def test_a_lifelike_record_survives(tmp_path: Path) -> None:
    record = toy_record(num_blocks=110)
    record.save(tmp_path)
    assert first_difference(record, RunRecord.load(tmp_path)) is None
