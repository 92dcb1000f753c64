"""Fixtures of the command-line tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_models import save_tiny_model
from cli_run import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command line in this process, whose heap is not to be settled for good."""
    yield runner(capsys)
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    import torch

    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def generate(run: Run, model: Path) -> Run:
    """Run ``generate`` with the tiny model."""
    return lambda *args: run("generate", "--model", model, *args)
