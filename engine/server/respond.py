"""Sends an answer, while listening for a client that leaves: then, and only then, its work stops."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagedserve.engine.server.answer import DONE, Answer
from pagedserve.engine.server.connection import ABORT
from pagedserve.engine.server.errors import ApiError
from pagedserve.engine.server.generation import Generation, ReaderGone

logger = logging.getLogger(__name__)
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerResponse(Response):
    """Runs a `Generation` and sends its `Answer`.

    A stream's status is decided when its first token is there: what fails before has a status of its own, what
    fails later is told as an event with an ``error``, and then ``[DONE]``.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self._generation: Generation = answer.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            watcher = asyncio.create_task(self._watch(receive))
            try:
                if self._answer.wanted.is_stream:
                    await self._stream(scope, receive, send)
                else:
                    await self._whole(scope, receive, send)
            except ReaderGone:
                pass
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if not self._generation.was_dropped or task is None or task.uncancel():
                    raise
                logger.warning("a connection was dropped: %s", error)
                # What was sent and not taken would be kept, with the connection, for as long as the client likes.
                scope.get("state", {}).get(ABORT, lambda: None)()
            finally:
                watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.end("disconnect")

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(await self._answer.whole(), media_type="application/json")
        except (ReaderGone, asyncio.CancelledError):
            raise
        except Exception as error:
            response = _as_api_error(error).response()
        self._generation.sending_since = time.monotonic()
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async with aclosing(self._answer.events()) as events:
                async for event in events:
                    if not has_begun:
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        has_begun = True
                    await self._send(send, event)
        except (ReaderGone, asyncio.CancelledError):
            raise
        except Exception as error:
            told = _as_api_error(error)
            if not has_begun:
                await told.response()(scope, receive, send)
                return
            await self._send(send, b"data: " + told.content() + b"\n\n")
            await self._send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        """Returns when the transport has room for more; `Generation.drop_if_stalled` sees how long that takes."""
        message: Message = {"type": "http.response.body", "body": body, "more_body": True}
        self._generation.sending_since = time.monotonic()
        await send(message)
        self._generation.sending_since = None


def _as_api_error(error: Exception) -> ApiError:
    """What is not foreseen is a bug of ours: its traceback goes to the log, the client is told that it failed."""
    if isinstance(error, ApiError):
        return error
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says more")
