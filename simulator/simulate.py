"""`simulate`: a trace or a recorded run, a policy and a cost model make a `RunRecord`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import simpy
from simpy.events import Event

from pagedserve.metrics.header import run_header
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.recorder import Recorder
from pagedserve.policy import Limits, Policy, Request, Scheduler, policy_names
from pagedserve.policy import policy as policy_preset
from pagedserve.simulator.clock import ABORT, ADD, At
from pagedserve.simulator.cost import CostModel
from pagedserve.simulator.outcomes import TrueLengths
from pagedserve.simulator.replica import Replica
from pagedserve.simulator.timing import ModelledTimes, RecordedTimes, Timing
from pagedserve.simulator.workload import Abort, Workload, recorded_workload, trace_workload
from pagedserve.traces.trace import Trace


def simulate(
    trace: Trace | RunRecord,
    policy: Policy | str,
    cost: CostModel | None = None,
    limits: Limits | None = None,
    *,
    overlap_depth: int = 0,
    max_tokens: int | None = None,
    client_timeout_s: float | None = None,
    max_in_flight: int | None = None,
    aborts: Sequence[Abort] = (),
    keep_plans: bool = False,
    check: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RunRecord:
    """Serve a workload with a policy on one simulated replica, to the end.

    ``trace``: a `Trace`, whose requests are sent at their arrivals and stop at their true lengths; or the
    `RunRecord` of a past run with its plans, replayed with its own intake, stops and times (then ``cost``
    stays None). ``policy``: a `Policy` or the name of a preset. ``limits`` default to `Limits()`, for a
    replay to the record's own.

    ``max_tokens``: the limit every request declares, by default the trace's longest output.
    ``client_timeout_s``: a client aborts a request that has not ended so long after it was sent.
    ``max_in_flight``: closed loop; a request is sent when it is due and fewer are in flight, and its latency
    counts from there. ``aborts``: further aborts at stated times. ``check``: recompute every invariant
    after every call. ``progress(num_ended, num_requests)`` is called as requests end.

    Requests that can never run are refused, recorded with the reason, and the run goes on. Deterministic:
    equal arguments give an equal record, in any process.
    """
    chosen = _policy(policy)
    if isinstance(trace, RunRecord):
        if (
            cost is not None
            or client_timeout_s is not None
            or max_in_flight is not None
            or aborts
            or max_tokens
        ):
            raise ValueError(
                "a replayed record brings its own times, aborts and limits; pass only the policy"
            )
        limits = limits or Limits(**trace.header["limits"])
        workload = recorded_workload(trace)
        timing: Timing = RecordedTimes(trace)
        overlap_depth = trace.header["overlap_depth"]
    else:
        if cost is None:
            raise ValueError("a trace has no step times; pass a cost model")
        limits = limits or Limits()
        block_size = limits.block_size if chosen.enable_prefix_caching else None
        workload = trace_workload(trace, block_size, max_tokens, aborts)
        timing = ModelledTimes(cost)
    for name, value in (("client_timeout_s", client_timeout_s), ("max_in_flight", max_in_flight)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0, or None for no limit")

    scheduler = Scheduler(chosen, limits, overlap_depth)
    recorder = Recorder(scheduler, keep_plans or isinstance(trace, RunRecord))
    env = simpy.Environment(initial_time=0)
    outcomes = TrueLengths(workload.lengths, workload.generated_keys)
    replica = Replica(env, scheduler, timing, outcomes, recorder, check)
    clients = Clients(env, replica, workload, client_timeout_s, max_in_flight, progress)
    env.process(replica.run())
    env.process(clients.send())
    env.process(clients.give_up())
    env.run()
    return recorder.record(_header(trace, scheduler, cost))


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


def _policy(policy: Policy | str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if policy not in policy_names():
        raise ValueError(
            f"unknown policy {policy!r}; choose from {', '.join(policy_names())}, or pass a Policy"
        )
    return policy_preset(policy)


def _header(trace: Trace | RunRecord, scheduler: Scheduler, cost: CostModel | None) -> dict[str, Any]:
    """What the record says of the run; nothing in it depends on when or where it ran."""
    described = None if cost is None else cost.describe()
    if isinstance(trace, RunRecord):
        source = {**trace.header["trace"], "replayed": True}
    else:
        source = {"name": trace.name, "sha256": trace.sha256(), "num_requests": len(trace)}
    return run_header(
        "simulated",
        scheduler,
        trace=source,
        device=None if described is None else {"name": described.get("device")},
        cost=described,
        packages=("simpy",),
        counters={} if cost is None else {"num_extrapolated": cost.num_extrapolated},
    )
