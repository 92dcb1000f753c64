"""The processes of `gpu_check`: run to their end or to their limit, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_part import FAILED, OK

KILLED = -signal.SIGKILL
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


def run_all(
    commands: Sequence[Sequence[str]],
    environment: dict[str, str],
    folder: Path,
    limit_s: float,
    logs: Sequence[Path] | None = None,
) -> list[int]:
    """Run commands at once and return their exit codes; those that still run after ``limit_s`` are killed.

    ``logs``: a file for what each prints; None: it goes where ours goes.
    """
    deadline, processes = time.monotonic() + limit_s, []
    for index, command in enumerate(commands):
        where: dict[str, Any] = {}
        if logs is not None:
            with logs[index].open("wb") as log:
                where = {"stdout": log.fileno(), "stderr": subprocess.STDOUT}
                processes.append(_started(command, environment, folder, where))
        else:
            processes.append(_started(command, environment, folder, where))
    return [_code(process, deadline) for process in processes]


def _started(
    command: Sequence[str], environment: dict[str, str], folder: Path, where: dict[str, Any]
) -> subprocess.Popen[Any]:
    # A session of its own, so that what it starts can be ended with it.
    return subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **where)


def _code(process: subprocess.Popen[Any], deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def found_by_tests(logs: Sequence[Path], codes: Sequence[int], out: Path) -> dict[str, Any]:
    """Status and the number of tests that passed and failed; the logs become one file."""
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    out.write_text("\n".join(texts), encoding="utf-8")
    counts: Counter[str] = Counter()
    for text in texts:
        last = text.strip().rpartition("\n")[2]
        counts.update({word: int(number) for number, word in _COUNT.findall(last)})
    told = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no test ran"
    return {
        "status": FAILED if any(codes) else OK,
        "reason": told + (": see tests.txt" if any(codes) else ""),
    }


def found_by_part(path: Path, code: int) -> dict[str, Any]:
    """What a part wrote before it ended, in whatever way."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"status": FAILED}
    reason = "; ".join(message for message in found.get("messages", ()) if message.startswith("FAILED"))
    if code and not reason:
        reason = f"its process ended with code {code}: see what it printed"
    return found | {"status": FAILED if code else found["status"], "reason": reason}
