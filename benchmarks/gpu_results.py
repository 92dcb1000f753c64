"""The folder that `gpu_check` leaves: where it comes from, and few and small enough files to be carried home."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_FILES = 8
MAX_BYTES = 16 << 20
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "pandas", "pyarrow", "pytest")
SOURCES = ("benchmarks", "engine", "kernels", "metrics", "policy", "traces", "validation")
KEPT = ("profile.json", "tests.txt")


def provenance(root: Path, commit: str | None) -> dict[str, Any]:
    """Machine, driver, versions, and which source: git's commit where there is one, and a hash in any case."""
    driver = _output(["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"])
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "nvidia_smi": driver,
        "versions": {name: _version(name) for name in PACKAGES},
        "git_commit": commit or _output(["git", "-C", str(root), "rev-parse", "HEAD"]),
        "git_changes": _output(["git", "-C", str(root), "status", "--porcelain", "-uno"]),
        "source_sha256": source_sha256(root),
    }


def source_sha256(root: Path) -> str:
    """Of the Python files of the folders that a run here depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in (root / name).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def keep_files(work: Path, out: Path) -> None:
    """Copy what the parts have made so far: the records go into one archive."""
    for name in KEPT:
        if (work / name).exists():
            shutil.copy(work / name, out / name)
    if (work / "records").is_dir():
        with tarfile.open(out / "records.tar.gz", "w:gz") as archive:
            archive.add(work / "records", "records")


def check_files(out: Path) -> list[str]:
    """What is wrong with the folder: too many files, or too large ones."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    problems = [
        f"{path.name} has {path.stat().st_size:,} bytes; {MAX_BYTES:,} are the most"
        for path in files
        if path.stat().st_size > MAX_BYTES
    ]
    if len(files) > MAX_FILES:
        problems.append(f"{out} holds {len(files)} files; {MAX_FILES} are the most: use an empty folder")
    return problems


def _output(command: list[str]) -> str | None:
    """What a command prints; None where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
