"""Where results go: places are checked before anything is computed; a file is written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.option_kinds import switch

if TYPE_CHECKING:
    from pagedserve.metrics.record import RunRecord

PANEL = "Output"
STDOUT = "-"
PICTURES = {
    "latency.png": "latency_distributions",
    "memory.png": "memory_over_time",
    "load.png": "load_over_time",
    "policies.png": "policies_compared",
}
"""File name to the function of `metrics.plots` that draws it."""


def out_folder(help: str) -> Any:
    """--out, where it names a folder."""
    return Option(metavar="DIR", help=help, rich_help_panel=PANEL)


def overwriting(what: str, panel: str = PANEL) -> Any:
    """--overwrite."""
    return switch("--overwrite", f"Replace {what}.", panel)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Results as JSON, and whether anything may be replaced."""

    json: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Write all results as JSON; - is standard output, and then nothing else goes there.",
            rich_help_panel=PANEL,
        ),
    ] = None
    overwrite: Annotated[bool, overwriting("results that exist already")] = False

    @property
    def is_quiet(self) -> bool:
        """Whether standard output belongs to the JSON."""
        return self.json == STDOUT

    def check(self, writes_more: bool = False) -> None:
        """Refuse a file that cannot be written; ``writes_more``: the command has other files to write."""
        if self.overwrite and not writes_more and self.json in (None, STDOUT):
            refuse("--overwrite: nothing is written that could be replaced; leave it out or name a file")
        if self.json is not None and self.json != STDOUT:
            refuse_unless_writable(Path(self.json), self.overwrite)

    def write(self, results: Mapping[str, Any]) -> None:
        """The results as one JSON object, keys in their order."""
        if self.json is None:
            return
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        if self.is_quiet:
            sys.stdout.write(text)
            return
        with as_bad_input(), replacing(Path(self.json)) as fresh:
            fresh.write_text(text, encoding="utf-8")


def refuse_unless_drawable(folder: Path, overwrite: bool) -> None:
    """Refuse a folder into which the pictures cannot be drawn; it need not exist yet."""
    if folder.exists() and not folder.is_dir():
        refuse(f"{folder}: a file has this name; give a folder for the pictures")
    for name in PICTURES:
        refuse_unless_writable(folder / name, overwrite, makes_folders=True)


def draw(records: Mapping[str, RunRecord], folder: Path) -> list[Path]:
    """The pictures of the runs, drawn into a folder; returns the files."""
    from pagedserve.metrics import plots

    with as_bad_input():
        folder.mkdir(parents=True, exist_ok=True)
    for name, function in PICTURES.items():
        figure = getattr(plots, function)(records)
        with as_bad_input(), replacing(folder / name) as fresh:
            figure.savefig(fresh)
    return [folder / name for name in PICTURES]


def refuse_unless_writable(path: Path, overwrite: bool, *, makes_folders: bool = False) -> None:
    """Refuse a file that exists (unless ``overwrite``) or whose folder is missing or closed to us.

    ``makes_folders``: missing folders will be made, so the nearest one that exists counts.
    """
    if path.is_dir():
        refuse(f"{path}: a folder has this name; give a file")
    if path.exists() and not overwrite:
        refuse(f"{path}: exists already; choose another name, or replace it with --overwrite")
    refuse_unless_folder_open(path.parent, makes_folders)


def refuse_unless_folder_open(folder: Path, makes_folders: bool) -> None:
    """Refuse a folder in which no file can be made."""
    nearest = folder
    while makes_folders and not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        found = "is a file" if nearest.exists() else "does not exist"
        refuse(f"{nearest}: {found}; a folder is needed to write into")
    if not os.access(nearest, os.W_OK | os.X_OK):
        refuse(f"{nearest}: no permission to write into this folder; choose another")


def refuse_unless_empty(folder: Path, overwrite: bool, what: str = "what is there") -> None:
    """Refuse a folder that cannot be made, or that holds something (unless ``overwrite``)."""
    refuse_unless_folder_open(folder.parent, makes_folders=True)
    if folder.exists() and not folder.is_dir():
        refuse(f"{folder}: a file has this name; choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        refuse(f"{folder}: not empty; choose another --out, or replace {what} with --overwrite")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; it becomes ``path`` when the block ends well, or is removed."""
    # The suffix stays at the end: writers go by it.
    fresh = path.parent / f".writing-{os.getpid()}-{secrets.token_hex(4)}-{path.name}"
    try:
        yield fresh
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
