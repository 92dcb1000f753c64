"""``pagedserve report``: what was recorded is shown again, and a damaged record is told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_run import SMALL, Run, assert_refused

from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import Slo, summarize


@pytest.fixture
def runs(run: Run, tmp_path: Path) -> Path:
    """A folder with the records of two policies."""
    folder = tmp_path / "runs"
    ran = run("simulate", *SMALL, "--policy", "mixed", "--policy", "static", "--out", folder)
    assert ran.code == 0, ran.err
    return folder


def test_shows_one_record(run: Run, runs: Path) -> None:
    ran = run("report", runs / "mixed")
    assert (ran.code, ran.err) == (0, "")
    tokens_per_s = summarize(RunRecord.load(runs / "mixed")).output_tokens_per_s
    assert "mixed: simulated on NVIDIA H200 SXM 141 GB, policy mixed, trace azure_shaped_500" in ran.out
    assert "mixed: 12 requests: 12 stop" in ran.out
    assert f"{tokens_per_s:,.1f}" in ran.out


def test_compares_all_records_of_a_folder(run: Run, runs: Path, tmp_path: Path) -> None:
    pictures, results = tmp_path / "pictures", tmp_path / "r.json"
    args = ("--plots", pictures, "--json", results, "--slo-tpot", 0.02, "--slo-e2e", 9)
    ran = run("report", runs, *args)
    assert ran.code == 0, ran.err
    found = json.loads(results.read_text())["runs"]
    assert list(found) == ["mixed", "static"]
    for label, shown in found.items():
        summary = summarize(RunRecord.load(runs / label), Slo(tpot_s=0.02, e2e_s=9))
        assert shown["metrics"] == summary.as_dict()
    assert "note:" not in ran.out  # they differ in policy only
    assert len(list(pictures.glob("*.png"))) == 4
    assert "\nSLO kept (% of requests) " in ran.out
    assert_refused(run("report", runs, "--plots", pictures), "latency.png", "--overwrite")
    assert run("report", runs, "--plots", pictures, "--overwrite").code == 0


def test_runs_of_equal_names_are_labelled_by_their_paths(run: Run, runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert (
        run("simulate", *SMALL, "--policy", "mixed", "--rate", 3, "--overlap-depth", 1, "--out", other).code
        == 0
    )
    ran = run("report", other, runs / "mixed", runs / "static", "--json", "-")
    assert list(json.loads(ran.out)["runs"]) == [str(other / "mixed"), str(runs / "mixed"), "static"]
    ran = run("report", other, runs)
    assert "note: these runs differ in trace, overlap_depth, not only in policy" in ran.out


def test_the_same_record_twice_is_refused(run: Run, runs: Path) -> None:
    assert_refused(run("report", runs, runs / "mixed"), runs / "mixed", "twice")


def _edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def _drop_column(folder: Path) -> None:
    table = pq.read_table(folder / "steps.parquet")
    pq.write_table(table.drop_columns(["commit_ns"]), folder / "steps.parquet")


def _lose_a_step(folder: Path) -> None:
    """A record whose tables contradict each other."""
    table = pq.read_table(folder / "steps.parquet")
    pq.write_table(table.slice(1), folder / "steps.parquet")


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no header": (lambda folder: (folder / "header.json").unlink(), ("header.json", "nothing")),
    "no JSON": (_edit("header.json", lambda text: text[:-9]), ("header.json", "expected JSON")),
    "no text": (_edit("header.json", lambda text: b"\xff\xfe" + text), ("header.json",)),
    "another version": (
        _edit("header.json", lambda text: text.replace(b'"format_version": 3', b'"format_version": 9')),
        ("format_version", "expected one of (1, 2, 3), found 9"),
    ),
    "no limits": (
        _edit("header.json", lambda text: text.replace(b'"block_size"', b'"blocksize"')),
        ("block_size", "found None"),
    ),
    "no table": (lambda folder: (folder / "calls.parquet").unlink(), ("calls.parquet", "nothing")),
    "half a table": (_edit("steps.parquet", lambda data: data[: len(data) // 2]), ("steps.parquet",)),
    "no column": (_drop_column, ("steps.parquet", "missing columns commit_ns")),
    "contradiction": (_lose_a_step, ("emissions", "step")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused(damage: str, run: Run, runs: Path) -> None:
    change, words = DAMAGES[damage]
    change(runs / "mixed")
    assert_refused(run("report", runs / "mixed"), *words)


def test_folders_that_are_no_records(run: Run, tmp_path: Path) -> None:
    assert_refused(run("report", tmp_path / "no"), "no", "expected the folder of a run record")
    assert_refused(run("report", tmp_path), "header.json", "nothing")
    assert_refused(run("report", tmp_path, "--overwrite"), "--overwrite")
