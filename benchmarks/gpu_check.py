"""All that only a GPU can show, in one run: correctness, kernel times, a profile, throughput, live replays.

Needs a CUDA device, torch, triton, tokenizers, numpy and pyarrow, and no network: weights are random, of the true
shapes of Qwen3-0.6B and Llama-3.1-8B. Every part is a process of its own, so that one that fails, hangs or breaks
the device is told, and the others go on. Parts shrink or are left out, and say so, to end within ``--budget-s``.

    python benchmarks/gpu_check.py --out gpu                     # on the machine with the GPU: under five minutes
    python benchmarks/gpu_check.py --report gpu                  # anywhere with the whole package installed
    python benchmarks/gpu_check.py --device cpu --tiny --out x   # a rehearsal in Triton's interpreter

The folder gets results.json, profile.json, records.tar.gz and tests.txt. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_part import FAILED, SKIPPED, FindingsState, Part
from gpu_processes import KILLED, found_by_part, found_by_tests, run_all
from gpu_results import check_files, keep_files, provenance

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "triton", "tokenizers", "numpy", "pyarrow")
TESTS = ("tests/kernels/test_gpu.py", "tests/kernels/test_gpu_swap.py")
TEST_GROUPS = (
    "equals_the_reference",
    "attention and not equals_the_reference",
    "graphs or engine",
    "not attention and not graphs and not engine",
)
BUDGET_S = 290.0
START_S = 5.0
"""Seconds that a process takes to begin and to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A part: the function that runs it (none: the tests), the least it is worth starting for, and its most."""

    name: str
    entry: str | None
    least_s: float
    most_s: float
    is_extra: bool = False
    """Nothing is kept free for it."""


PLANS = (
    Plan("tests", None, 15, 60),
    Plan("attention", "gpu_attention:run", 20, 60),
    Plan("layers", "gpu_layers:run", 15, 40),
    Plan("workload", "gpu_workload:run", 45, 90),
    Plan("live", "gpu_live:run", 70, 110),
    Plan("large", "gpu_workload:run_large", 40, 90, is_extra=True),
)


def main() -> int:
    options = _options()
    sys.path.append(str(ROOT))  # where the package is not installed
    if options.report is not None:
        if not (options.report / "results.json").exists():
            print(
                f"{options.report / 'results.json'} is not there: give the folder of --out", file=sys.stderr
            )
            return 1
        from gpu_report import report

        return report(options.report)
    if options.part is not None:
        return _run_part(options)
    return _run_all(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [plan.name for plan in PLANS]
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for the results")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for rehearsals")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds that all may take")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="parts to run")
    parser.add_argument("--commit", help="the commit, where git cannot tell it")
    parser.add_argument("--report", type=Path, metavar="DIR", help="show and compare a folder's results")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.device == "cpu") != options.tiny:
        parser.error("--device cpu and --tiny go together: the interpreter is far too slow for true shapes")
    return options


def _run_all(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"missing here: {', '.join(missing)}; install them, nothing was run", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "format_version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "is_tiny": options.tiny,
        "budget_s": options.budget_s,
        "provenance": provenance(ROOT, options.commit),
        "parts": {},
    }
    plans = [plan for plan in PLANS if plan.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        for index, plan in enumerate(plans):
            left_s = options.budget_s - (time.monotonic() - begun)
            kept_s = 0.0 if options.tiny else sum(p.least_s for p in plans[index + 1 :] if not p.is_extra)
            limit_s = min(left_s if options.tiny else plan.most_s, left_s - kept_s)
            found = _child(plan, options, Path(folder), 0.0 if options.tiny else plan.least_s, limit_s)
            results["parts"][plan.name] = found
            results["seconds"] = time.monotonic() - begun
            keep_files(Path(folder), options.out)
            (options.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    problems = check_files(options.out)
    for plan in plans:
        found = results["parts"][plan.name]
        print(f"{plan.name:10} {found['status']:8} {found['seconds']:6.1f} s  {found['reason']}")
    print(*problems, f"{results['seconds']:.1f} s in all; results in {options.out}", sep="\n")
    is_failed = any(found["status"] == FAILED for found in results["parts"].values())
    return 1 if is_failed or problems else 0


def _child(
    plan: Plan, options: argparse.Namespace, folder: Path, least_s: float, limit_s: float
) -> dict[str, Any]:
    """Run one part in a process of its own; what it found, with status, reason and seconds."""
    print(f"{plan.name}: up to {max(0.0, limit_s):.0f} s", flush=True)
    if limit_s < max(least_s, START_S):
        reason = f"it needs {least_s:.0f} s at least and {max(0.0, limit_s):.0f} s are left"
        return {"status": SKIPPED, "reason": reason, "seconds": 0.0}
    if plan.entry is None and find_spec("pytest") is None:
        return {"status": SKIPPED, "reason": "pytest is not installed", "seconds": 0.0}
    start, environment = time.monotonic(), _environment(options.device)
    if plan.entry is None:
        logs = [folder / f"{plan.name}-{index}.txt" for index in range(len(_test_groups(options.device)))]
        codes = run_all(_test_commands(options.device), environment, ROOT, limit_s, logs)
        found = found_by_tests(logs, codes, folder / "tests.txt")
    else:
        command = _part_command(plan, options, folder, limit_s - START_S)
        codes = run_all([command], environment, ROOT, limit_s)
        found = found_by_part(folder / f"part-{plan.name}.json", codes[0])
    if KILLED in codes:
        found |= {
            "status": FAILED,
            "reason": f"it was killed after {limit_s:.0f} s; what it had found is kept",
        }
    return found | {"seconds": time.monotonic() - start}


def _test_groups(device: str) -> tuple[str, ...]:
    """Which tests go together in a process: on a GPU's machine kernels are compiled in several at once."""
    return TEST_GROUPS if device != "cpu" else ("test",)


def _test_commands(device: str) -> list[list[str]]:
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=-q -m gpu"]
    return [[*pytest, "-k", group, *TESTS] for group in _test_groups(device)]


def _part_command(plan: Plan, options: argparse.Namespace, folder: Path, budget_s: float) -> list[str]:
    own = ["--part", plan.name, "--out", str(folder), "--device", options.device]
    tiny = ["--tiny"] if options.tiny else []
    return [sys.executable, str(Path(__file__).resolve()), *own, *tiny, "--budget-s", f"{budget_s:.1f}"]


def _environment(device: str) -> dict[str, str]:
    """Triton's interpreter is chosen before Triton is imported; threads give way in a rehearsal."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    added = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_INTERPRET": str(int(device == "cpu"))}
    if device == "cpu":
        added |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **added}


def _run_part(options: argparse.Namespace) -> int:
    """In the process of one part."""
    deadline = time.monotonic() + options.budget_s
    import torch

    findings = FindingsState(options.out / f"part-{options.part}.json")
    if options.device != "cpu" and not torch.cuda.is_available():
        findings.fail(f"torch {torch.__version__} finds no CUDA device; --device cpu --tiny is a rehearsal")
        return 1
    if options.device != "cpu":
        torch.manual_seed(0)
        free, total = torch.cuda.mem_get_info()
        findings.facts["device"] = {
            "name": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "multi_processors": torch.cuda.get_device_properties(0).multi_processor_count,
            "memory_gib": total / (1 << 30),
            "free_gib": free / (1 << 30),
            "cuda": torch.version.cuda,
        }
    part = Part(options.device, options.tiny, options.out, findings, deadline)
    module, _, function = next(p.entry for p in PLANS if p.name == options.part and p.entry).partition(":")
    with findings.trying(options.part):
        getattr(importlib.import_module(module), function)(part)
    findings.save()
    return int(findings.status == FAILED)


if __name__ == "__main__":
    sys.exit(main())
