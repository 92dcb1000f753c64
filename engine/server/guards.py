"""What stands before the app: keys, the size of a body, and a count of the answers."""

from __future__ import annotations

import base64
import binascii
from collections import Counter

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedserve.engine.server.errors import ApiError
from pagedserve.engine.server.settings import ServerSettings

OPEN_PATHS = ("/health",)
UNKNOWN_PATH = "other"
# What a browser shows may be opened with a password, which it asks for by itself. It would send that along with
# whatever other sites make it ask of this server, so it opens nothing that does work.
BROWSER_PATHS, BROWSER_FOLDER = ("/", "/metrics"), "/live/"
BASIC_CHALLENGE = 'Basic realm="PagedServe: any user name, an API key as the password", charset="UTF-8"'


class Guard:
    """Refuses requests without a key (401) and with a body that is too large (413); an ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, responses: Counter[tuple[str, int]]) -> None:
        """``responses`` counts the answers by path and status."""
        self._app, self._settings, self._responses = app, settings, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", UNKNOWN_PATH)
                self._responses[route, message["status"]] += 1
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._key_refusal(scope, headers) or self._size_refusal(headers)
        if refusal is not None:
            response = refusal.response()
            if refusal.status == 401 and _is_for_browsers(scope):
                response.headers.append("WWW-Authenticate", BASIC_CHALLENGE)
            await response(scope, receive, counted)
        else:
            await self._app(scope, self._bounded(receive), counted)

    def _key_refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        keys = self._settings.api_keys
        if not keys or scope["path"] in OPEN_PATHS:
            return None
        given = _given_key(headers, _is_for_browsers(scope))
        if given is not None and keys.opens(given):
            return None
        return ApiError(
            401, "no valid API key; send one as Authorization: Bearer KEY", code="invalid_api_key"
        )

    def _size_refusal(self, headers: Headers) -> ApiError | None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            return ApiError(413, self._too_large(f"{int(length):,} bytes"), code="body_too_large")
        return None

    def _too_large(self, size: str) -> str:
        return f"the body has {size}; this server takes {self._settings.max_body_bytes:,}: send less at once"

    def _bounded(self, receive: Receive) -> Receive:
        """Bodies may come in pieces without saying how large they are."""
        most, num_bytes = self._settings.max_body_bytes, 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > most:
                raise HTTPException(
                    413, self._too_large(f"more than {most:,} bytes"), {"Connection": "close"}
                )
            return message

        return bounded


def _is_for_browsers(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in BROWSER_PATHS or path.startswith(BROWSER_FOLDER))


def _given_key(headers: Headers, takes_password: bool) -> bytes | None:
    """The key that a request brings, if it brings one: a bearer's, or a password with any user name."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode("latin-1")
    if scheme.lower() == "basic" and takes_password:
        try:
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None
