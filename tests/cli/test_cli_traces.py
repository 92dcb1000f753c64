"""``pagedserve traces``: info, convert and list."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from cli_run import Run, assert_refused

from pagedserve.traces.lengths import Fixed
from pagedserve.traces.readers import format_names, read_trace
from pagedserve.traces.sample_files import sample, sample_names
from pagedserve.traces.synthesis import synthesize
from pagedserve.traces.transforms import first, scale_lengths, without_block_ids

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:45.9951690,396,109\r\n"
    "2023-11-16 18:15:50.9951690,8,0\r\n"
    "2023-11-16 18:15:51.9951690,oops,9"
)


def test_info_shows_the_report_and_the_summary(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_bytes(AZURE.encode())
    ran = run("traces", "info", path, "--on-error", "drop")
    assert (ran.code, ran.err) == (0, "")
    trace = read_trace(path, on_error="drop")
    for line in (*trace.report.lines(), *trace.describe().lines()):
        assert line in ran.out
    for said in (
        "azure2023 (detected)",
        "4 rows read, 3 kept",
        "1 dropped",
        "1 reordered",
        "line 5",
        trace.sha256(),
    ):
        assert said in ran.out


def test_info_as_json_and_with_changes(run: Run) -> None:
    ran = run("traces", "info", "sample:shared_prefix_200", "--first", 50, "--json", "-")
    trace = first(sample("shared_prefix_200"), 50)
    expected = {
        "name": trace.name,
        "sha256": trace.sha256(),
        "report": trace.report.as_dict(),
        "summary": trace.describe().as_dict(),
    }
    assert json.loads(ran.out) == json.loads(json.dumps(expected))


def test_convert_writes_the_native_format_with_all_changes(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "conv.csv", tmp_path / "out.csv.gz"
    source.write_bytes(AZURE.encode())
    ran = run(
        "traces",
        "convert",
        source,
        out,
        "--on-error",
        "drop",
        "--length-scale",
        2,
        "--output-length-scale",
        3,
    )
    assert ran.code == 0, ran.err
    assert f"3 requests written to {out}" in ran.out
    assert "1 dropped" in ran.out
    gzip.decompress(out.read_bytes())
    expected = scale_lengths(read_trace(source, on_error="drop"), 2, output_factor=3)
    assert read_trace(out).sha256() == expected.sha256()


def test_convert_forgets_block_ids(run: Run, tmp_path: Path) -> None:
    assert (
        run("traces", "convert", "sample:shared_prefix_200", tmp_path / "o.csv", "--ignore-block-ids").code
        == 0
    )
    expected = without_block_ids(sample("shared_prefix_200"))
    assert read_trace(tmp_path / "o.csv").sha256() == expected.sha256()


def test_convert_makes_synthetic_traces(run: Run, tmp_path: Path) -> None:
    args = ("--num-prompts", 9, "--rate", 4, "--burstiness", "inf", "--input-len", 20, "--output-len", 5)
    assert run("traces", "convert", "synthetic", tmp_path / "even.csv", *args).code == 0
    expected = synthesize(9, 4, burstiness=float("inf"), prompt=Fixed(20), output=Fixed(5))
    assert read_trace(tmp_path / "even.csv").sha256() == expected.sha256()


def test_convert_refuses_before_it_writes(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "conv.csv", tmp_path / "out.csv"
    source.write_bytes(AZURE.encode())
    out.write_text("mine")
    assert_refused(run("traces", "convert", source, out), out, "exists already", "--overwrite")
    assert_refused(run("traces", "convert", source, out, "--overwrite"), "conv.csv", "line 5", "oops")
    assert_refused(run("traces", "convert", source, tmp_path / "no" / "out.csv"), "no", "does not exist")
    assert_refused(run("traces", "convert", source, tmp_path), "a folder has this name")
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conv.csv", "out.csv"]
    assert run("traces", "convert", source, out, "--overwrite", "--on-error", "drop").code == 0
    assert len(read_trace(out)) == 3


def test_info_refuses(run: Run, tmp_path: Path) -> None:
    assert_refused(run("traces", "info", tmp_path / "no.csv"), "no.csv", "nothing there")
    assert_refused(run("traces", "info", "sample:nope"), "nope", "azure_shaped_500")
    assert_refused(run("traces", "info", "sample:azure_shaped_500", "--seed", 3), "--seed", "synthetic")
    assert_refused(run("traces", "info", "sample:azure_shaped_500", "--overwrite"), "--overwrite")


def test_list_names_every_format_and_sample(run: Run) -> None:
    ran = run("traces", "list")
    for name in (*format_names(), *sample_names()):
        assert f"  {name} " in ran.out
    found = json.loads(run("traces", "list", "--json", "-").out)
    assert tuple(found["formats"]) == format_names()
    assert tuple(found["samples"]) == sample_names()
