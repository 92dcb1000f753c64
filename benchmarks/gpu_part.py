"""One part of `gpu_check`: what it is given, and what it leaves behind even if it is killed."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(slots=True)
class FindingsState:
    """What a part found, written to its file after every addition. ``tables``: rows of plain values by name."""

    path: Path
    status: str = OK
    messages: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, table: str, row: dict[str, Any]) -> None:
        """One row more, also printed."""
        self.tables.setdefault(table, []).append(row)
        print("  " + "  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
        self.save()

    def say(self, message: str) -> None:
        """A message that belongs to the result: what was left out and why, say."""
        self.messages.append(message)
        print(f"  {message}", flush=True)
        self.save()

    def fail(self, message: str) -> None:
        """Something is wrong; the part may go on."""
        self.status = FAILED
        self.say(f"FAILED: {message}")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """An error inside fails the part, by name, and what comes after still runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")

    def save(self) -> None:
        """Whole or not at all."""
        content = {name: getattr(self, name) for name in ("status", "messages", "facts", "tables")}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        part.replace(self.path)


@dataclass(frozen=True, slots=True)
class Part:
    """``device``: cuda or cpu. ``folder``: for files that go with the result. Times are of `time.monotonic`."""

    device: str
    is_tiny: bool
    folder: Path
    findings: FindingsState
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds that this part may still take."""
        return self.deadline - time.monotonic()

    def has_time(self, needed_s: float, what: str) -> bool:
        """Whether so many seconds are left; if not, that ``what`` is left out is said."""
        if self.left_s >= needed_s:
            return True
        left = f"it needs about {needed_s:.0f} s and {max(0.0, self.left_s):.0f} s are left"
        self.findings.say(f"left out: {what}: {left}")
        return False


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
