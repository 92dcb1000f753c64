"""The live page and its feed over HTTP: static files, and a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedserve.engine.server.errors import ApiError
from pagedserve.engine.server.live import LiveFeed

logger = logging.getLogger(__name__)
router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing from elsewhere, nothing inline, nowhere to send anything but here, in nobody's frame.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@cache
def page_files() -> dict[str, bytes]:
    """The page's files by name, read once; what is not here is not served."""
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in KINDS}


def _file(name: str) -> Response:
    return Response(page_files()[name], headers=HEADERS, media_type=KINDS[Path(name).suffix])


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file(INDEX)


@router.get("/live/events")
async def events(request: Request) -> Response:
    """What the page shows, as it changes."""
    if request.headers.get("sec-fetch-site") == "cross-site":
        # It could not read them, but it could take the places of those who may.
        raise ApiError(
            403, "another site's page may not watch this server; open its own page", code="cross_site"
        )
    feed: LiveFeed = request.app.state.live
    return EventsResponse(feed, request.app.state.front.settings.send_timeout_s)


@router.get("/live/{name}")
async def page_file(name: str) -> Response:
    """A file that the page asks for."""
    if name not in page_files() or name == INDEX:
        raise HTTPException(404)
    return _file(name)


class EventsResponse(Response):
    """Sends a feed's events until the feed ends, the reader leaves, or takes nothing for ``send_timeout_s``."""

    def __init__(self, feed: LiveFeed, send_timeout_s: float) -> None:
        super().__init__()
        self._feed, self._send_timeout_s = feed, send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, receive, send))
        watching = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.wait({sending, watching})
        if not sending.cancelled():
            sending.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async with aclosing(self._feed.events()) as events:
                async for event in events:
                    if not has_begun:
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        has_begun = True
                    async with asyncio.timeout(self._send_timeout_s):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as refusal:
            await refusal.response()(scope, receive, send)
            return
        except TimeoutError:
            logger.warning(
                "a live page took nothing for %g s; its connection was dropped", self._send_timeout_s
            )
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
