"""Sends completions to an OpenAI-compatible server and sees their tokens arrive."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any

import httpx2

from pagedserve.validation.http_stream import (
    EventsState,
    Reply,
    ReplyState,
    StreamError,
    error_message,
    shown,
)

PREFLIGHT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 30.0
# Servers commonly close a connection idle for 5 s; one reused at that moment would fail a request.
KEEPALIVE_S = 2.0
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
FAILURES = (httpx2.HTTPError, httpx2.StreamError, StreamError, OSError)


class ServerError(ValueError):
    """A server cannot be used at all; one line that says where, what happened and what to do."""


class CompletionsClient:
    """Connections to one server, as many as there are requests in flight; an async context manager.

    ``clock`` gives the times of what is sent and received, in ns. ``timeout_s`` bounds each request from its
    sending to its end; None waits for ever.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], int],
        api_key: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0, or None for no limit")
        self._base = base_url(url)
        self.url = str(self._base.copy_with(userinfo=b"")).rstrip("/")
        self._clock = clock
        self._timeout_s = timeout_s
        # A compressed stream would be held back until a block of it is full.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._options: dict[str, Any] = {
            "headers": headers,
            "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            "limits": httpx2.Limits(keepalive_expiry=KEEPALIVE_S),
            "verify": httpx2.create_ssl_context(),
            # A proxy named in the environment does not reach this machine's own servers.
            "trust_env": self._base.host not in LOOPBACK_HOSTS,
        }
        # A pool looks at each of its connections whenever a request begins or ends, which for hundreds at
        # once delays what is due. So each request in flight has a pool of its own, of one connection.
        self._lanes = AsyncExitStack()
        self._idle: list[httpx2.AsyncClient] = []

    async def __aenter__(self) -> "CompletionsClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lanes.__aexit__(kind, error, trace)

    async def choose_model(self, wanted: str | None, prompt: Sequence[int]) -> str:
        """The model to name in requests: ``wanted`` if the server takes it, by default the first it lists.

        A name that the server does not list may be an alias: it is tried with one token of ``prompt``.
        Raises `ServerError` where no server answers, or it lists nothing, or refuses the name or the key.
        """
        names = await self._model_names()
        if wanted is None:
            if not names:
                raise ServerError(f"{self.url}: /v1/models lists no model; name the one to ask for")
            return names[0]
        if wanted not in names:
            body = {"model": wanted, "prompt": list(prompt[:1]), "max_tokens": 1}
            response = await self._ask("POST", "completions", json=body)
            if response.status_code >= 400:
                listed = ", ".join(names) or "none"
                raise ServerError(
                    f"{self.url} refuses the model {wanted!r}: {_http_error(response)}; it lists: {listed}"
                )
        return wanted

    async def complete(self, body: bytes) -> Reply:
        """Send one streaming request and read it to its end; what fails is told in the reply, never raised."""
        state, events = ReplyState(self._clock()), EventsState()
        error = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, state, events)
        except TimeoutError:
            error = f"timed out after {self._timeout_s} s"
        except StreamError as failure:
            error = str(failure)
        except FAILURES as failure:
            error = _told(failure)
        return state.reply(self._clock(), error)

    async def _stream(self, body: bytes, state: ReplyState, events: EventsState) -> None:
        async with (
            self._lane() as http,
            http.stream("POST", self._at("completions"), content=body) as response,
        ):
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                raise StreamError(_http_error(response))
            content_type = response.headers.get("content-type", "nothing")
            if not content_type.startswith("text/event-stream"):
                raise StreamError(f"expected a text/event-stream, found {shown(content_type)}")
            async for piece in response.aiter_bytes():
                at_ns = self._clock()
                for data in events.feed(piece):
                    state.take(data, at_ns)
            at_ns = self._clock()
            for data in events.close():
                state.take(data, at_ns)

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[httpx2.AsyncClient]:
        """A connection that no other request uses: the one that was free last, or a new one."""
        if not self._idle:
            self._idle.append(await self._lanes.enter_async_context(httpx2.AsyncClient(**self._options)))
        lane = self._idle.pop()
        try:
            yield lane
        finally:
            self._idle.append(lane)

    async def _model_names(self) -> list[str]:
        response = await self._ask("GET", "models")
        if response.status_code in (httpx2.codes.NOT_FOUND, httpx2.codes.METHOD_NOT_ALLOWED):
            return []
        if response.status_code != httpx2.codes.OK:
            raise ServerError(f"{self.url}: /v1/models answers {_http_error(response)}")
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{self.url}: /v1/models does not answer as an OpenAI-compatible server's does: "
                f"{shown(response.content)}"
            ) from error

    async def _ask(self, method: str, path: str, **content: Any) -> httpx2.Response:
        try:
            timeout = httpx2.Timeout(PREFLIGHT_TIMEOUT_S)
            async with self._lane() as http:
                return await http.request(method, self._at(path), timeout=timeout, **content)
        except FAILURES as error:
            raise ServerError(
                f"{self.url}: no server answers ({_told(error)}); is it running, and is this its address?"
            ) from error

    def _at(self, path: str) -> httpx2.URL:
        return self._base.copy_with(path=f"{self._base.path.rstrip('/')}/v1/{path}")


def base_url(url: str) -> httpx2.URL:
    """A server's address without the API's own path: ``/v1`` and ``/v1/completions`` at its end are left out.

    Raises `ServerError` unless it is one of http or https with a host.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ServerError(f"{url!r} is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerError(f"{url!r} is no server's address: expected one such as http://localhost:8000")
    path = parsed.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
    return parsed.copy_with(path=path or "/", query=None, fragment=None)


def completion_body(model: str, prompt: Sequence[int], max_tokens: int, *, extensions: bool = True) -> bytes:
    """The JSON of a greedy streaming completion of token ids that reports its usage.

    With ``extensions`` of vLLM the output has exactly ``max_tokens`` tokens (``ignore_eos``, ``min_tokens``)
    and every chunk states the output length so far (``continuous_usage_stats``). Without them, for servers
    that refuse fields they do not know, an output may be shorter and chunks are counted by other means.
    """
    options: dict[str, Any] = {"include_usage": True}
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
    }
    if extensions:
        body |= {"ignore_eos": True, "min_tokens": max_tokens}
        options["continuous_usage_stats"] = True
    return json.dumps(body, separators=(",", ":")).encode()


def _http_error(response: httpx2.Response) -> str:
    try:
        content = response.json()
    except ValueError:
        content = response.content
    said = error_message(content) if content else response.reason_phrase
    return f"HTTP {response.status_code}: {said}"


def _told(error: Exception) -> str:
    return shown(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
