"""Fixtures of the command-line tests."""

from __future__ import annotations

import pytest
from cli_run import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""
    return runner(capsys)
