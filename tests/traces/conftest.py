"""Where the trace tests find files: tiny ones they write, and the real ones of the shared folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SHARED_TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder of real public traces beside the checkout."""
    if not SHARED_TRACES.is_dir():
        pytest.skip("the real traces are not here: expected ../shared/traces beside the checkout")
    return SHARED_TRACES


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write text or bytes to a file and give its path."""

    def write_file(content: str | bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file
