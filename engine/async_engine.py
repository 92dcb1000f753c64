"""The asyncio side: streams of deltas from an engine that steps in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pagedserve.engine.engine import Engine, EngineDead
from pagedserve.engine.outputs import Delta
from pagedserve.engine.params import SamplingParams
from pagedserve.metrics.record import RunRecord

logger = logging.getLogger(__name__)
Seen = TypeVar("Seen")


@dataclass(slots=True, eq=False)
class _StreamState:
    """One caller of `AsyncEngine.stream`: where its deltas go, and what to abort when it leaves."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | EngineDead] = field(default_factory=asyncio.Queue)
    leave_reason: Callable[[], str] = lambda: "abort"
    open_requests: set[int] = field(default_factory=set)
    left: bool = False


Items = list[tuple[_StreamState, Delta | EngineDead]]


def _deliver(items: Items) -> None:
    """In the event loop of all these streams."""
    for stream, item in items:
        stream.queue.put_nowait(item)


class AsyncEngine:
    """Runs an `Engine` in a thread that sleeps when there is nothing to do.

    Use it as a context manager, or call ``close``. The event loop never waits for the device, nor for the
    tokeniser: prompts are taken in by worker threads, deltas come back through ``call_soon_threadsafe``. An
    error in the thread is logged, and ends all streams with `EngineDead`. A policy that leaves requests waiting
    while nothing runs is warned of once, in the log: what is handed in later may change its mind.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Guards the three below, and wakes the thread. Never held while the engine does something.
        self._woken = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._streams: set[_StreamState] = set()
        # What the step in hand has for the streams. It goes over in one call: each call wakes the event loop,
        # which may then hold the interpreter's lock while the step has work left.
        self._outbox: Items = []
        # A step and a record exclude each other; who wants the record takes its turn before the next step.
        self._stepping, self._turn = threading.Lock(), threading.Lock()
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="pagedserve-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs, finish the step in flight, and end the thread."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        self.engine.hurry()
        self._thread.join()
        self.engine.close()

    @property
    def error(self) -> BaseException | None:
        """What ended the engine's thread; None while it runs or if it was closed."""
        return self._error

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        leave_reason: Callable[[], str] = lambda: "abort",
        **options: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of all ``params.n`` completions as they come; each ends with one that has a finish reason.

        ``options`` are those of `Engine.submit`. Leaving the iteration early, or being cancelled, aborts what
        has not ended, with the reason that ``leave_reason`` gives then. Raises `EngineDead` when the engine
        stops by an error, or had stopped before.
        """
        stream = _StreamState(asyncio.get_running_loop(), leave_reason=leave_reason)
        try:
            await asyncio.to_thread(self._submit, stream, prompt, params, options)
            while stream.open_requests:
                item = await stream.queue.get()
                if isinstance(item, EngineDead):
                    raise item
                if item.finish_reason is not None:
                    stream.open_requests.discard(item.request)
                yield item
        finally:
            self._leave(stream)

    def abort(self, request: int, reason: str = "abort") -> None:
        """Ask for a request's end; its stream ends with that finish reason."""
        self.engine.abort(request, reason)
        with self._woken:
            self._woken.notify()

    async def record(self, trace: dict[str, Any] | None = None) -> RunRecord:
        """The run so far, taken between two steps by a worker thread; see `Engine.record`. No step runs meanwhile."""
        return await asyncio.to_thread(self.between_steps, lambda engine: engine.record(trace))

    def between_steps(self, look: Callable[[Engine], Seen]) -> Seen:
        """What ``look`` sees; it must change nothing, and be quick: no step begins meanwhile.

        Blocks until the step that runs is over: call it in a worker thread.
        """
        with self._turn, self._stepping:
            return look(self.engine)

    def _step(self) -> None:
        with self._turn:
            pass
        with self._stepping:
            try:
                self.engine.step()
            finally:
                self._send_out()

    def _send_out(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, Items] = {}
        for item in self._outbox:
            by_loop.setdefault(item[0].loop, []).append(item)
        self._outbox.clear()
        for loop, items in by_loop.items():
            with suppress(RuntimeError):  # a caller whose event loop is gone hears nothing
                loop.call_soon_threadsafe(_deliver, items)

    def _submit(
        self,
        stream: _StreamState,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: dict[str, Any],
    ) -> None:
        self._check_alive()
        states = self.engine.submit(
            prompt, params, lambda delta: self._outbox.append((stream, delta)), **options
        )
        with self._woken:
            stream.open_requests = {state.sequence.request.id for state in states}
            self._streams.add(stream)
            self._woken.notify()
            is_late = stream.left or self._closing
        if is_late:
            self._leave(stream)
        self._check_alive()

    def _check_alive(self) -> None:
        if self._error is not None or self._closing:
            raise EngineDead(f"the engine has stopped: {self._error or 'it was closed'}") from self._error

    def _leave(self, stream: _StreamState) -> None:
        """The caller has what it wanted, or gave up, perhaps while its prompt was still being taken in."""
        stream.left = True
        reason = stream.leave_reason()
        for request in stream.open_requests:
            self.engine.abort(request, reason)
        with self._woken:
            self._streams.discard(stream)
            self._woken.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
                self._warn_if_stranded()
            self.engine.abort_all()
            while self.engine.is_ready:
                self._step()
        except BaseException as error:
            logger.error("the engine has stopped", exc_info=error)
            with self._woken:
                self._error = error
                streams = list(self._streams)
            for stream in streams:
                dead = EngineDead(f"the engine has stopped: {error}")
                dead.__cause__ = error
                self._outbox.append((stream, dead))
            self._send_out()

    def _wait_for_work(self) -> bool:
        """Sleep until a step would do something; False when it is time to close."""
        with self._woken:
            while not self._closing and not self.engine.is_ready:
                self._woken.wait(self.engine.seconds_to_wake)
            return not self._closing

    def _warn_if_stranded(self) -> None:
        count = self.engine.num_stranded
        if count and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s schedules nothing while %d requests wait and nothing runs, and named no time to ask again: "
                "they wait until something is handed in, perhaps for ever",
                type(self.engine.scheduler.batching).__name__,
                count,
            )
