"""Executes notebooks. As a script it refreshes committed ones in place: their outputs, and nothing else.

python tests/notebooks/notebook_run.py notebooks/02_replay_a_production_trace.ipynb
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def read(path: Path) -> Any:
    """The notebook in a file, as nbformat's nodes."""
    return nbformat.read(path, as_version=4)


def execute(path: Path, variables: Mapping[str, str], timeout_s: int) -> Any:
    """The notebook of a file, run from top to bottom in a fresh kernel with these environment variables.

    Raises CellExecutionError with the traceback of the cell that failed, CellTimeoutError for one that takes
    longer than ``timeout_s``.
    """
    notebook = read(path)
    metadata = notebook.metadata.copy()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        record_timing=False,  # when each cell ran would change the file at every refresh
        resources={"metadata": {"path": str(path.parent)}},
    )
    # The kernel must find the package whether it is installed or not.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": paths, **variables})
    notebook.metadata = metadata
    return notebook


def refresh(path: Path) -> None:
    """Execute a committed notebook and write it back, if all of it ran."""
    nbformat.write(execute(path, {}, timeout_s=1800), path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name).resolve())
