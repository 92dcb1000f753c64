"""What `gpu_check` left, as tables; its live replays simulated with its own profile, and every decision replayed."""

from __future__ import annotations

import json
import math
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from pagedserve.metrics.profile import Profile
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Limits, policy
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.traces.readers import read_trace
from pagedserve.validation.planning import Setting, Traffic
from pagedserve.validation.validate import Validation, validation_of

TRACE_SUFFIX = ".trace.csv"
TARGETS = (
    ("decode attention, 64 x 2048", "64 decodes at 2047", "share_of_copy", 0.80),
    ("prefill attention, 8192", "a prompt of 8192", "share_of_matmul", 0.50),
)
MAX_STEP_OVER_DEVICE = 1.05


def report(folder: Path) -> int:
    """Print everything; 1 if a decision differs or something could not be read."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    _head(results)
    for name, title in (
        ("kernels", "Kernels"),
        ("workload", "Offline workload"),
        ("replays", "Live replays"),
    ):
        _table(
            title, [row for part in results["parts"].values() for row in part.get("tables", {}).get(name, ())]
        )
    if not results["is_tiny"]:
        _targets(results)
    live = results["parts"].get("live", {})
    needed = ("profile.json", "records.tar.gz")
    if "capacity_requests_per_s" not in live.get("facts", {}) or not all(
        (folder / n).exists() for n in needed
    ):
        print("\nno profile or no replays here: there is nothing to simulate")
        return 0
    return _compare(folder, live["facts"])


def _head(results: dict[str, Any]) -> None:
    came = results["provenance"]
    print(
        f"{results['date']}, {results['seconds']:.0f} s of {results['budget_s']:.0f} on {results['device']}"
    )
    print(f"{came['nvidia_smi'] or came['machine']}, {came['system']}, Python {came['python']}")
    print(", ".join(f"{name} {number}" for name, number in came["versions"].items() if number))
    print(f"commit {came['git_commit'] or 'not known'}, source {came['source_sha256'][:16]}")
    for name, part in results["parts"].items():
        print(f"{name:10} {part['status']:8} {part['seconds']:6.1f} s  {part['reason']}")
        for message in part.get("messages", ()):
            print(f"           {message}")
        for fact, value in part.get("facts", {}).items():
            print(f"           {fact}: {_plain(value)}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    shown = frame.to_string(index=False, float_format=lambda number: f"{number:.4g}", na_rep="")
    print(f"\n{title}\n{shown}")


def _targets(results: dict[str, Any]) -> None:
    """What the project wants of a GPU, and whether it is there."""
    print("\nTargets")
    rows = results["parts"].get("attention", {}).get("tables", {}).get("kernels", ())
    for label, shape, column, least in TARGETS:
        for row in rows:
            if row["shape"] == shape:
                verdict = "met" if row[column] >= least else "missed"
                print(f"{verdict}: {label}, {row['model']}: {row[column]:.2f} ({column}), wanted {least:.2f}")
    for row in results["parts"].get("workload", {}).get("tables", {}).get("workload", ()):
        if row["graphs"] and row["overlap_depth"] == 1:
            share = row["whole_step_over_device"]
            verdict = "met" if share <= MAX_STEP_OVER_DEVICE else "missed"
            print(f"{verdict}: whole step over device time: {share:.3f}, wanted {MAX_STEP_OVER_DEVICE}")


def _compare(folder: Path, facts: dict[str, Any]) -> int:
    """Every replay beside its simulation."""
    profile, capacity = Profile.load(folder / "profile.json"), facts["capacity_requests_per_s"]
    differing = 0
    with tempfile.TemporaryDirectory(prefix="gpu_report_") as work:
        with tarfile.open(folder / "records.tar.gz") as archive:
            archive.extractall(work, filter="data")
        for label, found in _validations(Path(work) / "records", profile, facts, capacity):
            decisions = found.decisions
            same = f"{decisions.steps_identical} of {decisions.steps_live} steps decided alike"
            print(f"\n{label}: live beside simulated; {same}; {_extrapolated(found)}")
            print(found.table.to_string(float_format=lambda number: f"{number:.4g}", na_rep=""))
            if not decisions.identical:
                differing += 1
                print(f"FIRST DIFFERENCE: {decisions.first_difference}")
    if differing:
        print(f"\nFAILED: decisions of {differing} replays differ")
    return int(differing > 0)


def _validations(
    records: Path, profile: Profile, facts: dict[str, Any], capacity: float
) -> Iterator[tuple[str, Validation]]:
    for path in sorted(records.glob(f"*{TRACE_SUFFIX}")):
        label = path.name.removesuffix(TRACE_SUFFIX)
        live, trace = RunRecord.load(records / label), read_trace(path)
        header = live.header
        limits = Limits(**header["limits"])
        setting = Setting(policy(facts["engine"]["policy"]), limits, header["overlap_depth"])
        rate = trace.describe().rate_per_s or math.inf
        traffic = Traffic(trace, 1.0, capacity, rate, rate / capacity)
        simulated = setting.simulated(trace, MeasuredCost(profile))
        yield label, validation_of(traffic, setting, profile, simulated, [live])


def _extrapolated(found: Validation) -> str:
    return f"{found.settings['num_steps_extrapolated']} simulated steps lie outside the profile"
