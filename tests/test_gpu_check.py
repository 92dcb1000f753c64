"""The GPU script in Triton's interpreter, where only what the GPU's machine has can be imported; then its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
ABSENT = (
    *("simpy", "typer", "rich", "scipy", "seaborn", "matplotlib", "fastapi", "llguidance", "gguf"),
    *("pydantic", "uvicorn", "prometheus_client", "httpx2", "hypothesis"),
)
BLOCKER = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
absent = {absent!r}

def find_allowed(cls, name, *more):
    return None if name.partition(".")[0] in absent else find(name, *more)

PathFinder.find_spec = classmethod(find_allowed)
"""
PARTS = ("tests", "attention", "layers", "workload", "live", "large")


def run_script(*options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    # Plugins of pytest that are installed here would import what is absent there.
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A whole run with the blocker, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "blocker").mkdir()
    (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER.format(absent=ABSENT))
    options = ("--device", "cpu", "--tiny", "--budget-s", "250", "--out", str(folder / "out"))
    return folder / "out", run_script(*options, path=str(folder / "blocker"))


def test_every_part_runs_with_little_installed(
    rehearsed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = rehearsed
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert {name: part["status"] for name, part in results["parts"].items()} == dict.fromkeys(PARTS, "ok")
    tables = {name: part.get("tables", {}) for name, part in results["parts"].items()}
    assert len(tables["attention"]["kernels"]) == 6
    assert sum("sdpa_us" in row for row in tables["attention"]["kernels"]) == 3
    assert {row["kernel"] for row in tables["layers"]["kernels"]} >= {
        "norm",
        "rotate and write, fp8",
        "greedy",
    }
    assert [(row["graphs"], row["overlap_depth"]) for row in tables["workload"]["workload"]] == [
        (True, 1),
        (True, 0),
        (False, 0),
        (False, 1),
    ]
    assert [row["load"] for row in tables["live"]["replays"]] == [0.5, 0.85, 1.0, 0.85]
    assert sorted(path.name for path in folder.iterdir()) == [
        "profile.json",
        "records.tar.gz",
        "results.json",
        "tests.txt",
    ]


def test_the_report_simulates_and_compares(
    rehearsed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = rehearsed
    done = run_script("--report", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "live beside simulated" in line]
    assert len(found) == 5
    for line in found:
        identical, _, steps = line.partition("; ")[2].partition(" steps")[0].partition(" of ")
        assert identical == steps != "0"
    assert done.stdout.count("output_tokens_per_s ") >= 5
    assert "error_pct" in done.stdout


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """A module of the attention part cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(absent=("gpu_attention",)))
    options = ("--device", "cpu", "--tiny", "--only", "attention", "large", "--out", str(tmp_path / "out"))
    done = run_script(*options, path=str(tmp_path))
    assert done.returncode == 1
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert parts["attention"]["status"] == "failed"
    assert "gpu_attention" in parts["attention"]["reason"]
    assert parts["large"]["status"] == "ok"


def test_what_has_no_time_is_left_out(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--tiny", "--budget-s", "0.5", "--only", "layers", "--out", str(tmp_path))
    done = run_script(*options)
    assert done.returncode == 0
    part = json.loads((tmp_path / "results.json").read_text())["parts"]["layers"]
    assert part["status"] == "skipped"
    assert "are left" in part["reason"]


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    done = run_script("--tiny", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--device cpu and --tiny go together" in done.stderr
    done = run_script("--report", str(tmp_path))
    assert done.returncode == 1
    assert "results.json is not there" in done.stderr
