"""The command as a process: quick help, clean streams, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import SMALL, Run

import pagedserve
from pagedserve.metrics.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "pagedserve.cli.main"]
HEAVY = ("numpy", "pandas", "pyarrow", "scipy", "simpy", "matplotlib", "seaborn", "torch")
LIST_HEAVY = f"""
import sys
from pagedserve.cli.main import main
try:
    main()
finally:
    print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
"""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--help"],
        ["--version"],
        ["simulate", "--help"],
        ["traces", "convert", "--help"],
        ["generate", "--help"],
        ["profile", "--help"],
        ["serve", "--help"],
        ["validate", "--help"],
        ["replay", "--help"],
        ["demo", "--help"],
    ],
)
def test_help_is_quick_because_it_imports_nothing_heavy(args: list[str]) -> None:
    ran = _run([sys.executable, "-c", LIST_HEAVY, *args])
    assert (ran.returncode, ran.stderr) == (0, "[]\n")


def test_heavy_imports_would_be_seen() -> None:
    ran = _run([sys.executable, "-c", LIST_HEAVY, "traces", "list"])
    assert ran.stderr == "['numpy']\n"


@pytest.mark.parametrize(
    "args",
    [
        ["simulate"],
        ["report"],
        ["traces", "info"],
        ["traces", "convert"],
        ["generate"],
        ["profile"],
        ["serve"],
        ["validate"],
        ["replay"],
        ["demo"],
    ],
)
def test_help_has_examples_that_fit_a_narrow_terminal(args: list[str], run: Run) -> None:
    ran = run(*args, "--help")
    assert ran.code == 0
    assert "Examples:" in ran.out
    assert f"pagedserve {' '.join(args)} " in ran.out
    assert " " * 3 + "pagedserve" in ran.out, "an example does not stand on its own line"


def test_version_and_bare_command(run: Run) -> None:
    assert run("--version").out == f"pagedserve {pagedserve.__version__}\n"
    bare = run()
    assert (bare.code, bare.err) == (0, "")
    assert bare.out == run("--help").out


def test_json_on_standard_output_is_alone_there() -> None:
    ran = _run([*COMMAND, "simulate", *SMALL, "--json", "-"])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["runs"]["vllm_v1"]["metrics"]["num_finished"] == 12


def test_bad_input_exits_with_2_and_no_traceback() -> None:
    ran = _run([*COMMAND, "simulate", "--trace", "nope.csv"])
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "Error: nope.csv: nothing there; give a trace file, sample:NAME or synthetic\n"


def test_interrupted_between_two_policies_the_first_is_whole_and_nothing_else_is_there(
    tmp_path: Path,
) -> None:
    out = tmp_path / "runs"
    args = ["--policy", "mixed", "--policy", "serial", "--out", str(out), "--json", str(tmp_path / "r.json")]
    command = [*COMMAND, "simulate", "--trace", "sample:azure_shaped_500", "--length-scale", "3", *args]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "saved in" in line:  # now the second run has begun, which takes some seconds
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == "Error: interrupted: what was being computed is lost, what was saved before is whole\n"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in out.iterdir()] == ["mixed"]
    assert RunRecord.load(out / "mixed").steps.num_rows > 0
