"""The notebooks run from top to bottom, and the committed copies show what they promise."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_run import ROOT, execute, read

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIVE = [path for path in NOTEBOOKS if "PAGEDSERVE_NOTEBOOK_MODEL" in path.read_text(encoding="utf-8")]
"""Those that run a model."""
PNG = b"\x89PNG\r\n\x1a\n"
MAX_FILE_BYTES = 700_000
SMALLER = {"PAGEDSERVE_NOTEBOOK_SCALE": "0.1", "PAGEDSERVE_NOTEBOOK_MODEL": "tiny"}
IDENTICAL = re.compile(r"([\d,]+) of ([\d,]+) live steps planned identically")

assert NOTEBOOKS, "no notebook was found, so nothing would be tested"


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _texts(notebook: Any) -> list[str]:
    return ["".join(output.get("text", "")) for output in _outputs(notebook)]


def _pictures(notebook: Any) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in _outputs(notebook)]
    return [base64.b64decode(picture) for picture in found if picture is not None]


def _check_decisions(notebook: Any) -> int:
    """Every count of identical steps that the notebook printed names all steps; how many counts there are."""
    counts = IDENTICAL.findall("\n".join(_texts(notebook)))
    for identical, live in counts:
        assert identical == live
        assert live != "0"
    return len(counts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_a_smaller_input(path: Path) -> None:
    committed = read(path)
    notebook = execute(path, SMALLER, timeout_s=240)
    assert len(_pictures(notebook)) == len(_pictures(committed))
    whole = _texts(committed)
    assert _texts(notebook) != whole, "the scale changed nothing: is PAGEDSERVE_NOTEBOOK_SCALE read?"
    assert _check_decisions(notebook) == _check_decisions(committed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_copy_was_executed_in_order_without_errors(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in _outputs(notebook):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_copy_has_pictures_and_names_no_machine(path: Path) -> None:
    pictures = _pictures(read(path))
    assert len(pictures) >= 3
    for picture in pictures:
        assert picture.startswith(PNG)
        assert len(picture) > 10_000, "a picture this small is an empty frame"
    text = path.read_text(encoding="utf-8")
    for place in ("/home/", "/root/", "/tmp/", "site-packages"):
        assert place not in text, place


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_copy_is_small_enough_to_keep(path: Path) -> None:
    assert path.stat().st_size < MAX_FILE_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_smaller_input_is_documented(path: Path) -> None:
    assert "PAGEDSERVE_NOTEBOOK_SCALE" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", LIVE, ids=lambda path: path.stem)
def test_the_committed_copy_ran_the_real_model(path: Path) -> None:
    assert any(text.startswith("smollm2-135m on ") for text in _texts(read(path)))


def test_the_validation_was_committed_with_every_decision_identical() -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith("03"))
    assert _check_decisions(read(path)) == 3
