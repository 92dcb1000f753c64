"""The layering rule of the design: who may import whom, and that half of the tree never touches torch."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EVERY = ("policy", "traces", "metrics", "kernels", "engine", "simulator", "validation", "cli")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "policy": (),
    "traces": ("policy",),
    "metrics": ("policy",),
    "kernels": (),
    "engine": ("policy", "traces", "metrics", "kernels"),
    "simulator": ("policy", "traces", "metrics"),
    "validation": ("policy", "traces", "metrics", "kernels", "engine", "simulator"),
    "cli": EVERY,
}
FOLDERS = [name for name in EVERY if any((ROOT / name).rglob("*.py"))]
TORCH = {"torch", "triton", "transformers", "safetensors"}
TORCH_FREE = ("policy", "traces", "metrics", "simulator")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import in a file, at any depth, those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; write pagedserve.…"
            module = node.module or ""
            if module == "pagedserve":
                yield from ((node.lineno, f"pagedserve.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def faults(path: Path, folder: str) -> Iterator[str]:
    """Imports of a file that its folder may not have."""
    for line, module in imported_modules(path):
        top, _, rest = module.partition(".")
        where = f"{path.name}:{line} imports {module}"
        if top == "pagedserve":
            part = rest.partition(".")[0]
            if part in EVERY and part != folder and part not in MAY_IMPORT[folder]:
                yield f"{where}; {folder} may import {', '.join(MAY_IMPORT[folder]) or 'nothing'}"
        elif top in EVERY:
            yield f"{where}; write pagedserve.{module}"
        elif folder == "policy" and top not in sys.stdlib_module_names:
            yield f"{where}; policy is standard library only"
        elif folder in TORCH_FREE and top in TORCH:
            yield f"{where}; {folder} is free of torch"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_the_design_allows(folder: str) -> None:
    found = [fault for path in sorted((ROOT / folder).rglob("*.py")) for fault in faults(path, folder)]
    assert not found, "\n".join(found)


def test_every_folder_with_code_is_in_the_package() -> None:
    linked = {path.name for path in (ROOT / "pagedserve").iterdir() if path.is_symlink()}
    assert set(FOLDERS) <= linked
    for name in linked:
        target = (ROOT / "pagedserve" / name).readlink()
        assert target == Path("..") / name, f"pagedserve/{name} points to {target}"


@pytest.mark.parametrize(
    ("folder", "line", "message"),
    [
        ("policy", "import numpy", "standard library only"),
        ("policy", "from pagedserve.metrics import record", "may import nothing"),
        ("simulator", "from pagedserve.engine.runner import Runner", "may import policy, traces, metrics"),
        ("engine", "from pagedserve import simulator", "may import policy, traces, metrics, kernels"),
        ("metrics", "def f():\n    import torch", "free of torch"),
        ("validation", "import pagedserve.cli.main", "may import"),
        ("traces", "import policy", "write pagedserve.policy"),
    ],
)
def test_the_rule_sees_a_planted_import(folder: str, line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(line)
    (fault,) = faults(path, folder)
    assert message in fault


LOAD_ALL = """
import importlib, pkgutil, sys
for name in {folders!r}:
    package = importlib.import_module("pagedserve." + name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def loaded_by(folders: tuple[str, ...]) -> set[str]:
    """Top-level modules present after a fresh interpreter has imported every module of the folders."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL.format(folders=folders)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_policy_traces_metrics_and_simulator_load_without_torch() -> None:
    folders = tuple(name for name in TORCH_FREE if name in FOLDERS)
    assert not loaded_by(folders) & TORCH


def test_policy_loads_nothing_but_the_standard_library() -> None:
    """Compared with what an interpreter has loaded that imports nothing of ours."""
    ours = {"pagedserve"}
    foreign = loaded_by(("policy",)) - loaded_by(()) - set(sys.stdlib_module_names) - ours
    assert not foreign


def test_metrics_load_without_the_plotting_stack_until_a_plot_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pagedserve.metrics.summary; print(*sys.modules)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"matplotlib", "seaborn"} & set(done.stdout.split())
