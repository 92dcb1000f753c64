"""A server in a process of its own, seen from outside: its address, its threads' CPU time, its metrics."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

# The operating system is told the threads' names; a thread that one of them starts inherits its name, so the
# workers of torch and of the tokenizer count with whoever uses them. Python 3.14 does this by itself.
PROGRAM = """
import ctypes, threading
prctl, run = ctypes.CDLL(None).prctl, threading.Thread.run
def named(self):
    prctl(15, self.name.encode()[:15])
    run(self)
threading.Thread.run = named
{before}
from pagedserve.cli.main import main
main()
"""
PARTS = {
    "pagedserve-engi": "engine",
    "pagedserve-devi": "engine",
    "pagedserve-toke": "front",
    "asyncio_": "front",
}
START_S = 120


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by part: ``front`` (event loop, tokenizer), ``engine``, ``other``. Linux only."""
        spent: dict[str, float] = defaultdict(float)
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                name = (task / "comm").read_text().strip()
                spent_ns = int((task / "schedstat").read_text().split()[0])
            except OSError:  # the thread has ended
                continue
            known = (part for begin, part in PARTS.items() if name.startswith(begin))
            is_main = task.name == str(self.process.pid)
            spent["front" if is_main else next(known, "other")] += spent_ns / 1e9
        return dict(spent)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All samples of /metrics, by name and labels without those that never change."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        return {
            (sample.name, _varying(sample.labels)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def _varying(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in labels.items() if item[0] not in ("model_name", "engine", "policy")))


@contextmanager
def served(arguments: Sequence[str], *, before: str = "") -> Iterator[Served]:
    """``pagedserve serve`` with these arguments at a free port; ``before`` is run before the command."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", PROGRAM.format(before=before), "serve", "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        try:
            yield Served(process, _url(process, said.fileno()))
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def _url(process: subprocess.Popen[bytes], said: int) -> str:
    by = time.monotonic() + START_S
    while time.monotonic() < by:
        text = os.pread(said, 1 << 20, 0).decode(errors="replace")
        for line in text.splitlines():
            if " on http://" in line:
                return line.split(" on ")[1].split()[0]
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}:\n{text}")
        time.sleep(0.05)
    raise SystemExit(f"the server does not listen after {START_S} s")


class Scraped:
    """What /metrics counted between two scrapes."""

    def __init__(self, before: Mapping, after: Mapping) -> None:
        self._before, self._after = before, after

    def counter(self, name: str) -> float:
        """By how much a counter, or all of its labels together, rose."""
        return sum(value - self._before.get(key, 0.0) for key, value in self._after.items() if key[0] == name)

    def mean_s(self, name: str) -> float:
        """Mean of a histogram's observations."""
        count = self.counter(f"{name}_count")
        return self.counter(f"{name}_sum") / count if count else float("nan")

    def quantile_s(self, name: str, share: float) -> float:
        """A quantile of a histogram, linear within its bucket as Prometheus computes it."""
        buckets = sorted(
            (float(dict(labels)["le"]), value - self._before.get((found, labels), 0.0))
            for (found, labels), value in self._after.items()
            if found == f"{name}_bucket"
        )
        total = buckets[-1][1] if buckets else 0.0
        low, below = 0.0, 0.0
        for high, count in buckets:
            if total and count >= share * total:
                return (
                    low
                    if high == float("inf")
                    else low + (high - low) * (share * total - below) / (count - below)
                )
            low, below = high, count
        return float("nan")
