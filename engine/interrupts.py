"""Ctrl-C in the middle of a step would leave policy and device apart; it is heeded when the step is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InterruptsState:
    """Within ``holding``, SIGINT waits for the ends of the ``step`` blocks; elsewhere it acts at once."""

    def __init__(self) -> None:
        self._in_step = self._pending = False
        self._before: Callable[[int, FrameType | None], Any] | None = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Take SIGINT over from Python's handler, in the main thread; elsewhere no signal arrives."""
        before = signal.getsignal(signal.SIGINT)
        if not callable(before) or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = before
        signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One piece of work that is never broken off; an interrupt meanwhile acts at its end."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        if self._pending:
            self._pending = False
            self._interrupted(signal.SIGINT, None)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._in_step or self._before is None:
            self._pending = True
        else:
            self._before(number, frame)
