"""One client's TCP connection: uvicorn's HTTP/1.1 protocol, with limits on how long a request may take to arrive."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedserve.engine.server.errors import ApiError

ABORT = "pagedserve.abort"
"""Where a request's ``scope["state"]`` has a function that ends its connection without sending what is left."""
MAX_HEADER_BYTES = 1 << 16
_ARRIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)


class Connection(H11Protocol):
    """Drops a client that opens a connection, or begins a request, and does not finish it in time (slowloris).

    The time, ``receive_timeout_s``, runs from the opening of the connection, and on a kept one from a request's
    first byte, until its last byte is there; whoever sends a byte now and then gains nothing. Between requests
    uvicorn's keep-alive limit holds. Made for uvicorn by `connections`.
    """

    receive_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, ABORT: self._abort}
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """After every piece that comes, and after an answer for what came meanwhile."""
        super().handle_events()
        has_begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if self.conn.their_state in _ARRIVED or self.transport.is_closing():
            self._stop_waiting()
        elif has_begun:
            self._await_rest()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP: as uvicorn does, with an error that OpenAI's clients read."""
        limit = f"headers of {MAX_HEADER_BYTES:,} bytes at most"
        self._refuse(ApiError(400, f"{msg.rstrip('.')}; send HTTP/1.1 with {limit}"))

    def _await_rest(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.receive_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.response_started:
            self._abort()
        else:
            message = (
                f"the request did not arrive within {self.receive_timeout_s:g} s; send it faster, or in parts"
            )
            self._refuse(ApiError(408, message, code="receive_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, whatever part of a request is there."""
        if not self.transport.is_closing():
            body = error.content()
            reason = {400: "Bad Request", 408: "Request Timeout"}[error.status]
            head = (
                f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            )
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()

    def _abort(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None:  # also what the operating system holds for the client goes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def connections(receive_timeout_s: float) -> type[Connection]:
    """A `Connection` class with that limit, as uvicorn's ``http`` wants it."""
    return type("Connection", (Connection,), {"receive_timeout_s": receive_timeout_s})
