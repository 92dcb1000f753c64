"""A skipped test tests nothing: a reason that is not in ``allowed_skips.txt`` fails the run."""

import os
import shutil
from pathlib import Path

import pytest

# Without a GPU our kernels run in Triton's interpreter, which has to be known before Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

ALLOWED = tuple(
    line.strip()
    for line in (Path(__file__).parent / "allowed_skips.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
)
_unlisted: list[str] = []


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ALLOWED):
        _unlisted.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unlisted and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _unlisted:
        terminalreporter.write_line(f"skipped for a reason not in allowed_skips.txt: {line}", red=True)
