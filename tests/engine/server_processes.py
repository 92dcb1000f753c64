"""``pagedserve serve`` in a process of its own for tests, and clients of it on real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_apps import save_tiny

from pagedserve.engine.model.fetch import PACKAGED_MODELS, cache_home

ROOT = Path(__file__).resolve().parents[2]
# The command, after something is done to the engine.
PROGRAM = """
import torch
from pagedserve.cli.main import main

torch.set_num_threads(1)
{before}
main()
"""
SLOW = """
import time
from pagedserve.engine.loop import EngineLoop
step = EngineLoop.step
def slow(self):
    time.sleep(0.02)
    return step(self)
EngineLoop.step = slow
"""
LONG = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}


def servable(name: str, folder: Path) -> str:
    """What to serve for "tiny", or for a packaged model; skips where that is not in the cache."""
    if name == "tiny":
        return str(save_tiny(folder / "tiny"))
    file = cache_home() / "models" / name / PACKAGED_MODELS[name].member.rpartition("/")[2]
    if not file.is_file():
        pytest.skip(
            f"{name} is not in the cache ({file}); `pagedserve generate --model {name} Hi` fetches it"
        )
    return str(file)


class Server:
    """A process, what it says, and where it listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, []
        self.url = ""
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if " on http://" in line:
                self.url = line.split(" on ")[1].split()[0]
                self._listens.set()
        self._listens.set()

    def wait(self) -> str:
        """Until it listens; the start line."""
        assert self._listens.wait(60)
        assert self.url, self.said
        return next(line for line in self.lines if self.url in line)

    @property
    def said(self) -> str:
        """Everything on standard error so far."""
        return "\n".join(self.lines)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def served(model: Path | str, *args: object, before: str = "", **environment: str) -> Iterator[Server]:
    command = [sys.executable, "-c", PROGRAM.format(before=before), "serve", "--model", str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    options = {"cwd": ROOT, "env": environment, "text": True}
    process = subprocess.Popen(
        [*command, "--port", "0", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    server = Server(process)
    try:
        yield server
    finally:
        process.kill()
        process.wait()


def post(url: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def get(url: str, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(f"{url}{path}", headers=headers, timeout=60, trust_env=False)


class Streaming(threading.Thread):
    """A client that reads a stream in a thread of its own; ``began`` at its first bytes."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self.began, self.text, self.status = threading.Event(), "", 0
        self.start()

    def run(self) -> None:
        address = f"{self._url}/v1/completions"
        with httpx2.stream("POST", address, json=self._body, timeout=60, trust_env=False) as response:
            self.status = response.status_code
            for text in response.iter_text():
                self.text += text
                self.began.set()
        self.began.set()


def line(text: str, name: str) -> str:
    return next((line for line in text.splitlines() if name in line and line[0] != "#"), "")
