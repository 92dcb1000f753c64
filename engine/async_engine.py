"""The asyncio side: streams of deltas from an engine that steps in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import CompletionState, Delta
from pagedserve.engine.params import SamplingParams


class EngineDead(RuntimeError):
    """The engine's thread ended with an error; nothing runs any more."""


class AsyncEngine:
    """Runs an `Engine` in a thread that sleeps when there is nothing to do.

    Use it as a context manager, or call ``close``. The event loop never waits for the device: deltas reach
    it through ``call_soon_threadsafe``. An error in the thread ends all streams with `EngineDead`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._woken = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._streams: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Delta | EngineDead]]] = {}
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
        self._thread.join()
        self.engine.close()

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Delta]:
        """Deltas of all ``params.n`` completions as they come; each ends with one that has a finish reason.

        ``options`` are those of `Engine.submit`. Leaving the iteration early aborts what has not ended.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta | EngineDead] = asyncio.Queue()
        states = await asyncio.to_thread(self._submit, loop, queue, prompt, params, options)
        open_requests = {state.sequence.request.id for state in states}
        try:
            while open_requests:
                delta = await queue.get()
                if isinstance(delta, EngineDead):
                    raise delta
                if delta.finish_reason is not None:
                    open_requests.discard(delta.request)
                yield delta
        finally:
            for request in open_requests:
                self.abort(request)

    def abort(self, request: int, reason: str = "abort") -> None:
        """Ask for a request's end; its stream ends with that finish reason."""
        with self._woken:
            self.engine.abort(request, reason)
            self._woken.notify()

    def _submit(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue[Delta | EngineDead],
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: dict[str, Any],
    ) -> list[CompletionState]:
        def listen(delta: Delta) -> None:
            if delta.finish_reason is not None:
                self._streams.pop(delta.request, None)
            _send(loop, queue, delta)

        with self._woken:
            if self._error is not None or self._closing:
                raise EngineDead(f"the engine has stopped: {self._error or 'it was closed'}")
            states = self.engine.submit(prompt, params, listen, **options)
            self._streams.update({state.sequence.request.id: (loop, queue) for state in states})
            self._woken.notify()
        return states

    def _run(self) -> None:
        try:
            while True:
                with self._woken:
                    while not self._closing and not self.engine.is_ready:
                        self._woken.wait(self.engine.seconds_to_wake)
                if self._closing:
                    break
                self.engine.step()
            self._drain()
        except BaseException as error:
            self._error = error
            dead = EngineDead(f"the engine has stopped: {error}")
            dead.__cause__ = error
            for loop, queue in {id(q): (lo, q) for lo, q in self._streams.values()}.values():
                _send(loop, queue, dead)

    def _drain(self) -> None:
        for request in list(self._streams):
            self.engine.abort(request)
        while self.engine.is_ready:
            self.engine.step()


def _send(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], item: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, item)
