"""Every mistake gets one line on stderr, exit code 2, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import SMALL, Run, assert_refused

TRACE = ("--trace", "sample:azure_shaped_500")
SYNTHETIC = ("--trace", "synthetic")
THREE = (*SYNTHETIC, "--num-prompts", "3", "--rate", "1")

BAD_SIMULATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no trace": ((), ("--trace", "pagedserve simulate --help")),
    "unknown option": ((*TRACE, "--bogus"), ("--bogus",)),
    "stray argument": ((*TRACE, "stray"), ("stray",)),
    "missing file": (("--trace", "nope.csv"), ("nope.csv", "nothing there", "sample:NAME")),
    "folder as trace": (("--trace", "/"), ("a folder",)),
    "unknown sample": (("--trace", "sample:x"), ("'x'", "azure_shaped_500")),
    "format of a sample": ((*TRACE, "--format", "native"), ("--format",)),
    "format of synthetic": ((*SYNTHETIC, "--on-error", "drop"), ("--on-error",)),
    "unknown policy": ((*TRACE, "--policy", "nope"), ("'nope'", "prefill_first", "vllm_v1")),
    "same policy twice": ((*TRACE, "--policy", "mixed", "--policy", "mixed"), ("mixed", "twice")),
    "unknown setting": ((*TRACE, "--set", "foo=1"), ("'foo'", "watermark")),
    "no setting": ((*TRACE, "--policy", "mixed,paged"), ("'paged'", "KEY=VALUE")),
    "a name is no setting": ((*TRACE, "--set", "name=x"), ("'name'",)),
    "setting twice": ((*TRACE, "--set", "watermark=0", "--set", "watermark=0.1"), ("watermark", "twice")),
    "setting in two places": (
        (*TRACE, "--set", "watermark=0", "--policy", "mixed,watermark=0.1"),
        ("watermark", "one place"),
    ),
    "caching in two places": (
        (*TRACE, "--set", "enable_prefix_caching=true", "--no-enable-prefix-caching"),
        ("enable_prefix_caching",),
    ),
    "setting no number": ((*TRACE, "--set", "watermark=much"), ("watermark", "'much'")),
    "setting out of range": ((*TRACE, "--set", "watermark=2"), ("watermark is 2.0", "below 1")),
    "setting no truth": ((*TRACE, "--set", "enable_prefix_caching=maybe"), ("'maybe'", "true or false")),
    "unknown allocator": ((*TRACE, "--policy", "mixed,allocator=slab"), ("'slab'", "contiguous_max")),
    "contiguous with prefix caching": (
        (*TRACE, "--policy", "mixed,allocator=contiguous_max", "--enable-prefix-caching"),
        ("ContiguousMax", "turn --enable-prefix-caching off"),
    ),
    "contiguous in a small pool": (
        (*TRACE, "--policy", "mixed,allocator=contiguous_max", "--num-blocks", "100"),
        ("32768", "1600", "raise --num-blocks"),
    ),
    "unknown device": ((*TRACE, "--device", "tpu"), ("'tpu'", "h200-sxm")),
    "unknown model": ((*TRACE, "--model", "gpt-9"), ("'gpt-9'", "Llama-3.1-8B", "config.json")),
    "model too large": ((*TRACE, "--device", "l40s", "--model", "llama-2-70b"), ("does not fit", "GiB")),
    "unknown cost": ((*TRACE, "--cost", "free"), ("--cost", "'free'", "roofline, measured, constant")),
    "constant without numbers": ((*TRACE, "--cost", "constant"), ("--step-us", "--num-blocks")),
    "constant with a device": (
        (*TRACE, "--cost", "constant", "--step-us", "1", "--num-blocks", "9", "--device", "h200"),
        ("--device", "leave it out"),
    ),
    "constant times with roofline": ((*TRACE, "--decode-us", "3"), ("--decode-us", "roofline")),
    "pool twice": (
        (*TRACE, "--num-blocks", "9", "--gpu-memory-utilization", "0.5"),
        ("--num-blocks", "--gpu-memory-utilization"),
    ),
    "utilization": ((*TRACE, "--gpu-memory-utilization", "1.2"), ("1.2", "at most 1")),
    "no whole number": ((*TRACE, "--num-blocks", "many"), ("--num-blocks", "'many'", "at least 1")),
    "no block": ((*TRACE, "--num-blocks", "0"), ("--num-blocks", "0")),
    "no number": ((*TRACE, "--host-gap-us", "x"), ("--host-gap-us", "'x'", "at least 0")),
    "not a number": ((*TRACE, "--host-gap-us", "nan"), ("nan",)),
    "beyond an hour": ((*TRACE, "--host-gap-us", "1e12"), ("3,600,000,000",)),
    "more requests than tokens": (
        (*TRACE, "--max-num-seqs", "9000"),
        ("--max-num-seqs 9000 exceeds --max-num-batched-tokens 8192", "raise the token budget"),
    ),
    "no room for an output": ((*TRACE, "--max-model-len", "1"), ("--max-model-len", "1", "at least 2")),
    "overlap depth": ((*TRACE, "--overlap-depth", "2"), ("--overlap-depth", "2", "0 to 1")),
    "time-out": ((*TRACE, "--client-timeout", "0"), ("--client-timeout", "above 0")),
    "in flight": ((*TRACE, "--max-in-flight", "0"), ("--max-in-flight",)),
    "declared limit": ((*TRACE, "--max-tokens", "0"), ("--max-tokens", "at least 1")),
    "objective": ((*TRACE, "--slo-ttft", "-1"), ("--slo-ttft", "-1")),
    "window": ((*TRACE, "--window", "5"), ("'5'", "A:B")),
    "endless window": ((*TRACE, "--window", "0:inf"), ("0:inf", "finite")),
    "window backwards": ((*TRACE, "--window", "9:3"), ("from 9.0 to 3.0",)),
    "nothing left": ((*TRACE, "--window", "9000:"), ("no request is left", "500 dropped")),
    "rate and time scale": ((*TRACE, "--rate", "2", "--time-scale", "2"), ("--rate 2", "--time-scale 2")),
    "rate of one instant": ((*TRACE, "--first", "1", "--rate", "2"), ("two different arrival times",)),
    "infinite rate of a file": ((*TRACE, "--rate", "inf"), ("rate", "finite")),
    "over limit without limit": ((*TRACE, "--over-limit", "drop"), ("--max-prompt",)),
    "over limit unknown": ((*TRACE, "--over-limit", "crop", "--max-prompt", "9"), ("'crop'", "clip, drop")),
    "synthetic option of a file": ((*TRACE, "--seed", "1", "--num-prompts", "3"), ("--num-prompts, --seed",)),
    "synthetic without numbers": (SYNTHETIC, ("--num-prompts", "--rate")),
    "synthetic without lengths": (THREE, ("--input-len",)),
    "synthetic with bad lengths": (
        (*THREE, "--input-len", "normal:3", "--output-len", "4"),
        ("--input-len", "'normal:3'", "uniform:LOW:HIGH"),
    ),
    "synthetic with half a log-normal": (
        (
            *SYNTHETIC,
            "--num-prompts",
            "3",
            "--rate",
            "1",
            "--input-len",
            "3",
            "--output-len",
            "lognormal:median=9",
        ),
        ("--output-len", "sigma"),
    ),
    "lengths twice": (
        (*THREE, "--input-len", "3", "--lengths-from", "x"),
        ("--lengths-from",),
    ),
    "lengths from nowhere": (
        (*THREE, "--lengths-from", "nope.csv"),
        ("nope.csv", "No such file"),
    ),
    "bad prefix": (
        (*THREE, "--input-len", "3", "--output-len", "4", "--shared-prefix", "8"),
        ("'8'", "GROUPS:TOKENS"),
    ),
    "pictures without a folder": ((*TRACE, "--plots"), ("--plots", "--out")),
    "plans without a record": ((*TRACE, "--keep-plans"), ("--keep-plans", "--out")),
    "nothing to replace": ((*TRACE, "--overwrite"), ("--overwrite",)),
    "JSON into no folder": ((*TRACE, "--json", "/nope/r.json"), ("/nope", "does not exist")),
    "JSON over a folder": ((*TRACE, "--json", "/"), ("/", "a folder has this name")),
}


@pytest.mark.parametrize("case", BAD_SIMULATIONS)
def test_simulate_refuses(case: str, run: Run) -> None:
    args, words = BAD_SIMULATIONS[case]
    assert_refused(run("simulate", *args), *words)


def test_block_sizes_of_trace_and_scheduler_must_divide(run: Run) -> None:
    ran = run("simulate", "--trace", "sample:shared_prefix_200", "--block-size", 24, "--policy", "vllm_v1")
    assert_refused(ran, "16", "24", "without_block_ids")
    ran = run("simulate", "--trace", "sample:shared_prefix_200", "--block-size", 24, "--policy", "mixed")
    assert ran.code == 0  # nothing is shared, so nothing has to divide


def test_a_bad_row_names_file_line_field_and_value(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,ten,44\n")
    assert_refused(run("simulate", "--trace", path), "bad.csv", "line 2", "ContextTokens", "ten")
    assert_refused(
        run("simulate", "--trace", path, "--format", "azure2025"), "azure2025", "azure2023, azure2024"
    )
    assert_refused(run("simulate", "--trace", path, "--on-error", "skip"), "'skip'", "raise, drop")
    assert_refused(run("simulate", "--trace", path, "--on-error", "drop"), "no request is left", "1 dropped")


def test_files_that_are_no_text_or_no_trace(run: Run, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    (tmp_path / "empty.csv").touch()
    (tmp_path / "model.json").write_text("{")
    assert_refused(run("simulate", "--trace", tmp_path / "noise"))
    assert_refused(run("simulate", "--trace", tmp_path / "empty.csv"), "empty.csv", "is empty")
    assert_refused(run("simulate", *TRACE, "--model", tmp_path / "model.json"), "model.json")


def test_a_name_with_a_line_end_still_gives_one_line(run: Run, tmp_path: Path) -> None:
    assert_refused(run("simulate", "--trace", f"{tmp_path}/a\nb.csv"), "nothing there")


def test_outputs_are_refused_before_anything_is_computed(run: Run, tmp_path: Path) -> None:
    file, full = tmp_path / "file", tmp_path / "full" / "vllm_v1"
    file.write_text("mine")
    full.mkdir(parents=True)
    (full / "notes.txt").write_text("mine")
    assert_refused(run("simulate", *SMALL, "--out", file / "below"), file, "is a file")
    assert_refused(run("simulate", *SMALL, "--plots", "--out", file), file, "a folder for the pictures")
    assert_refused(run("simulate", *SMALL, "--json", file), file, "exists already", "--overwrite")
    assert_refused(run("simulate", *SMALL, "--out", full.parent), full, "not empty", "--overwrite")
    assert_refused(run("simulate", *SMALL, "--out", full.parent, "--overwrite"), full, "holds no record")
    (full / "header.json").write_text("{}")
    # Only a folder that holds a record and nothing else is replaced.
    ran = run("simulate", *SMALL, "--out", full.parent, "--overwrite")
    assert ran.code == 2
    assert "notes.txt" in ran.err
    assert (full / "notes.txt").read_text() == file.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


@pytest.mark.parametrize("args", [("bogus",), ("traces",), ("traces", "bogus"), ("--bogus",), ("report",)])
def test_unknown_commands(args: tuple[str, ...], run: Run) -> None:
    assert_refused(run(*args), "--help")


def test_an_error_of_ours_is_not_taken_for_the_users(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug inside a simulation keeps its traceback, even if it is a ValueError."""

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("pagedserve.simulator.simulate.simulate", broken)
    from pagedserve.cli.main import app

    with pytest.raises(ValueError, match="a bug"):
        app(["simulate", *SMALL])
