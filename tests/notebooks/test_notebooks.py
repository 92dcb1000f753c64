"""The notebooks run from top to bottom, and the committed copies show what they promise."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PNG = b"\x89PNG\r\n\x1a\n"

assert NOTEBOOKS, "no notebook was found, so nothing would be tested"


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _pictures(notebook: Any) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in _outputs(notebook)]
    return [base64.b64decode(picture) for picture in found if picture is not None]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_a_smaller_input(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed, notebook = _read(path), _read(path)
    monkeypatch.setenv("PAGEDSERVE_NOTEBOOK_SCALE", "0.1")
    # The kernel must find the package whether it is installed or not.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()  # raises CellExecutionError with the cell's traceback
    assert len(_pictures(notebook)) == len(_pictures(committed))
    texts = ["".join(output.get("text", "")) for output in _outputs(notebook)]
    whole = ["".join(output.get("text", "")) for output in _outputs(committed)]
    assert texts != whole, "the scale changed nothing: does the notebook read PAGEDSERVE_NOTEBOOK_SCALE?"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_copy_was_executed_in_order_without_errors(path: Path) -> None:
    notebook = _read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in _outputs(notebook):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_copy_has_pictures_and_names_no_machine(path: Path) -> None:
    pictures = _pictures(_read(path))
    assert len(pictures) >= 3
    for picture in pictures:
        assert picture.startswith(PNG)
        assert len(picture) > 10_000, "a picture this small is an empty frame"
    text = path.read_text(encoding="utf-8")
    for place in ("/home/", "/root/", "/tmp/", "site-packages"):
        assert place not in text, place


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_smaller_input_is_documented(path: Path) -> None:
    assert "PAGEDSERVE_NOTEBOOK_SCALE" in path.read_text(encoding="utf-8")
