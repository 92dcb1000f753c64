"""Runs the app in a process: a socket, signals, draining, and what the process says when it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from pagedserve.engine.server.connection import MAX_HEADER_BYTES, connections
from pagedserve.engine.server.front import FrontEnd

logger = logging.getLogger(__name__)
KEEPALIVE_S = 75
CLOSING_S = 3
FAULT_POLL_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT)
Teller = Callable[[str], None]


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        self.listens.set()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0: any free one. OSError says why it cannot be had."""
    family, kind, number, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


async def serve(app: FastAPI, sock: socket.socket, tell: Teller, started: Callable[[], None]) -> bool:
    """Serve until a signal or a fault of the engine ends it; True if it ended as it should.

    SIGTERM and SIGINT: new requests get 503 while the open ones finish, within ``shutdown_timeout_s``; then
    what is left is ended. A second signal ends it at once. A fault of the engine ends it with False, when its
    requests have been told. ``started`` is called when connections are taken.
    """
    front: FrontEnd = app.state.front
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=connections(front.settings.receive_timeout_s),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    server = _Uvicorn(config)
    await front.backend.warm_up()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    watching = asyncio.create_task(front.watch_readers())
    try:
        await asyncio.wait(
            {serving, listens := asyncio.create_task(server.listens.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        listens.cancel()
        started()
        await _until_the_end(front, serving, tell)
        app.state.live.close()
        server.should_exit = True
        await serving
    finally:
        watching.cancel()
        front.codec.close()
        with suppress(asyncio.CancelledError):
            await watching
    if front.backend.fault is not None:
        tell(f"Error: the engine failed: {front.backend.fault}")
        return False
    return True


async def _until_the_end(front: FrontEnd, serving: asyncio.Task[None], tell: Teller) -> None:
    """Until a signal and the drain that it asks for are over, or the engine fails, or the server does."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    draining: asyncio.Task[None] | None = None
    try:
        while not serving.done() and front.backend.fault is None:
            if draining is not None and draining.done():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(FAULT_POLL_S):
                    name = await signals.get()
                    again = draining is not None
                    limit_s = 0.0 if again else front.settings.shutdown_timeout_s
                    tell(f"{name}: " + _farewell(len(front.open), limit_s))
                    if draining is not None:
                        draining.cancel()
                    draining = asyncio.create_task(front.drain(limit_s))
        await front.answered(CLOSING_S)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        if draining is not None:
            draining.cancel()


def _farewell(num_open: int, limit_s: float) -> str:
    if not num_open:
        return "no request is open; going down"
    if not limit_s:
        return f"ending {num_open} open requests and going down"
    return f"no new requests; {num_open} open ones have {limit_s:g} s to finish"
