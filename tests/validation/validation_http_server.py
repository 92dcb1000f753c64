"""A scripted OpenAI-compatible server on the loopback interface, for tests of a client."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pagedserve.traces.trace import Trace

MS = 1_000_000
MODELS = {"data": [{"id": "tiny"}, {"id": "other"}]}


@dataclass(frozen=True, slots=True)
class Status:
    """An answer that is no stream."""

    code: int
    body: bytes | dict[str, Any] = b""
    content_type: str = "application/json"


class Drop(Exception):
    """Raised by a script: the connection is lost."""


Script = Callable[[dict[str, Any]], Status | Iterator[bytes]]


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def choice(text: str, finish_reason: str | None = None, usage: int | None = None, **more: Any) -> bytes:
    """An event with one choice; ``usage``: the output length so far."""
    made: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **more}]}
    return event(made if usage is None else {**made, "usage": {"completion_tokens": usage}})


def usage(num_tokens: int, **more: Any) -> bytes:
    """The event that states the output length after the last choice."""
    return event({"choices": [], "usage": {"completion_tokens": num_tokens, **more}})


def tokens_one_by_one(body: dict[str, Any]) -> Iterator[bytes]:
    """As vLLM answers: one token an event, with a running usage where asked for, the sum at the end."""
    count = body["max_tokens"]
    running = body["stream_options"].get("continuous_usage_stats", False)
    for index in range(count):
        reason = "length" if index == count - 1 else None
        yield choice(f" {index}", reason, usage=index + 1 if running else None)
    yield usage(count)
    yield event("[DONE]")


@dataclass(slots=True)
class ServerState:
    """A running server: its address, and what it was asked."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_connections: int = 0

    def asked(self, name: str) -> list[Any]:
        """A field of every request, in the order of arrival."""
        return [body.get(name) for body in self.bodies]


class _Server(ThreadingHTTPServer):
    """Each connection in a thread of its own."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, script: Script, models: Status | dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.models = script, models
        self.state = ServerState(f"http://127.0.0.1:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self.server.state.num_connections += 1

    def do_GET(self) -> None:
        found = self.server.models if self.path == "/v1/models" else Status(404, {"detail": "Not Found"})
        self._answer(found if isinstance(found, Status) else Status(200, found))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._answer(Status(404, {"detail": "Not Found"}))
            return
        self.server.state.bodies.append(body)
        self.server.state.headers.append({name.lower(): value for name, value in self.headers.items()})
        try:
            answer = self.server.script(body)
        except Drop:
            self.close_connection = True
            return
        if isinstance(answer, Status):
            self._answer(answer)
        else:
            self._stream(answer)

    def _answer(self, answer: Status) -> None:
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.code)
        self.send_header("content-type", answer.content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, pieces: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except (Drop, OSError):  # OSError: the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(
    script: Script = tokens_one_by_one, models: Status | dict[str, Any] = MODELS
) -> Iterator[ServerState]:
    """Serve on a free port; ``script`` answers completions."""
    server = _Server(script, models)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def pieces(*parts: bytes) -> Callable[[dict[str, Any]], Iterator[bytes]]:
    """A script that gives every request the same answer."""
    return lambda body: iter(parts)


def trace_of(*rows: tuple[int, int, int], **optional: Any) -> Trace:
    """Rows of (arrival in ms, prompt tokens, output tokens)."""
    arrivals, prompt_lengths, outputs = zip(*rows, strict=True)
    return Trace.of("small", [at * MS for at in arrivals], prompt_lengths, outputs, **optional)


THREE = trace_of((5, 4, 3), (5, 2, 1), (20, 3, 5))


def prompts_of(trace: Trace) -> list[list[int]]:
    """Prompts as long as a trace says; each begins with its position, so that a server can tell them apart."""
    return [[index] + [7] * (length - 1) for index, length in enumerate(trace.num_prompt_tokens.tolist())]
