"""The clients of a simulated replica: open or closed loop, with time-outs and aborts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import simpy
from simpy.events import Event

from pagedserve.policy import Request
from pagedserve.simulator.clock import ABORT, ADD, At
from pagedserve.simulator.replica import Replica
from pagedserve.simulator.workload import Workload


class Clients:
    """Sends a workload's requests in order and carries out aborts and time-outs."""

    def __init__(
        self,
        env: simpy.Environment,
        replica: Replica,
        workload: Workload,
        client_timeout_s: float | None,
        max_in_flight: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._env = env
        self._replica = replica
        self._workload = workload
        self._timeout_ns = None if client_timeout_s is None else round(client_timeout_s * 1e9)
        self._seats = None if max_in_flight is None else simpy.Resource(env, capacity=max_in_flight)
        self._held: dict[int, Any] = {}
        self._progress = progress
        self._num_ended = 0
        replica.on_end = self._ended

    def send(self) -> Generator[Event, Any, None]:
        """The SimPy process of arrivals."""
        env = self._env
        for request, due_ns, add_ns in self._workload.sends:
            if add_ns > env.now:
                yield At(env, add_ns, ADD)
            if self._seats is not None:
                self._held[request.id] = seat = self._seats.request()
                yield seat
                if env.now > add_ns:
                    # The seat came with a commit: the order of the instant is commit, abort, add.
                    yield At(env, int(env.now), ADD)
                    request = replace(request, arrival_ns=int(env.now))
            self._send_one(request, due_ns)

    def _send_one(self, request: Request, due_ns: int) -> None:
        if self._timeout_ns is not None:
            timeout = At(self._env, int(self._env.now) + self._timeout_ns, ABORT)
            assert timeout.callbacks is not None
            timeout.callbacks.append(lambda _, request=request.id: self._time_out(request))
        self._replica.add(request, due_ns)

    def _time_out(self, request: int) -> None:
        if request in self._replica.scheduler.states:
            self._replica.abort(request, "timeout")

    def give_up(self) -> Generator[Event, Any, None]:
        """The SimPy process of the workload's aborts, in order of time."""
        for abort in self._workload.aborts:
            yield At(self._env, abort.at_ns, ABORT)
            self._replica.abort(abort.request, abort.reason)

    def _ended(self, request: int) -> None:
        self._num_ended += 1
        seat = self._held.pop(request, None)
        if seat is not None and self._seats is not None:
            self._seats.release(seat)
        if self._progress is not None:
            self._progress(self._num_ended, self._workload.num_requests)
