"""`simulate`: a trace or a recorded run, a policy and a cost model make a `RunRecord`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import simpy

from pagedserve.metrics.header import run_header
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.recorder import Recorder
from pagedserve.policy import IllegalPlan, Limits, Policy, Scheduler, policy_names
from pagedserve.policy import policy as policy_preset
from pagedserve.simulator.clients import Clients
from pagedserve.simulator.cost import CostModel, check_priced
from pagedserve.simulator.outcomes import TrueLengths
from pagedserve.simulator.replica import Replica
from pagedserve.simulator.timing import ModelledTimes, RecordedTimes
from pagedserve.simulator.workload import Abort, recorded_workload, trace_workload
from pagedserve.traces.trace import Trace


def simulate(
    trace: Trace | RunRecord,
    policy: Policy | str,
    cost: CostModel | None = None,
    limits: Limits | None = None,
    *,
    overlap_depth: int | None = None,
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

    ``overlap_depth``: 0 (default) or 1. ``max_tokens``: the limit every request declares, by default the
    trace's longest output.
    ``client_timeout_s``: a client aborts a request that has not ended so long after it was sent.
    ``max_in_flight``: closed loop; a request is sent when it is due and fewer are in flight, and its latency
    counts from there. ``aborts``: further aborts at stated times. ``check``: recompute every invariant
    after every call. ``progress(num_ended, num_requests)`` is called as requests end.

    Requests that can never run are refused, recorded with the reason, and the run goes on. Deterministic:
    equal arguments give an equal record, in any process.
    """
    chosen = _policy(policy)
    _check_clients(client_timeout_s, max_in_flight)
    if isinstance(trace, RunRecord):
        given = (cost, overlap_depth, max_tokens, client_timeout_s, max_in_flight)
        if aborts or any(option is not None for option in given):
            raise ValueError(
                "a replayed record brings its own times, depth, aborts and lengths; pass only a policy"
            )
        limits, overlap_depth = limits or Limits(**trace.header["limits"]), trace.header["overlap_depth"]
        workload, timing = recorded_workload(trace), RecordedTimes(trace)
    else:
        if cost is None:
            raise ValueError("a trace has no step times; pass a cost model")
        limits = limits or Limits()
        check_priced(cost, chosen, limits)
        block_size = limits.block_size if chosen.enable_prefix_caching else None
        workload, timing = trace_workload(trace, block_size, max_tokens, aborts), ModelledTimes(cost)
    num_before = 0 if cost is None else cost.num_extrapolated
    scheduler = Scheduler(chosen, limits, overlap_depth or 0)
    recorder = Recorder(scheduler, keep_plans or isinstance(trace, RunRecord))
    env = simpy.Environment(initial_time=0)
    outcomes = TrueLengths(workload.lengths, workload.generated_keys, workload.failed)
    replica = Replica(env, scheduler, timing, outcomes, recorder, check)
    _run(env, replica, Clients(env, replica, workload, client_timeout_s, max_in_flight, progress))
    if not isinstance(trace, RunRecord):
        _check_finished(scheduler)
    counters = {} if cost is None else {"num_extrapolated": cost.num_extrapolated - num_before}
    return recorder.record(_header(trace, scheduler, cost, counters))


def _run(env: simpy.Environment, replica: Replica, clients: Clients) -> None:
    env.process(replica.run())
    env.process(clients.send())
    env.process(clients.give_up())
    env.run()


def _check_finished(scheduler: Scheduler) -> None:
    if scheduler.has_work:
        raise IllegalPlan(
            f"{type(scheduler.batching).__name__} schedules nothing although {len(scheduler.states)} requests are "
            "left and no other will come; schedule them, or say with wake_at() when to ask again"
        )


def _check_clients(client_timeout_s: float | None, max_in_flight: int | None) -> None:
    for name, value in (("client_timeout_s", client_timeout_s), ("max_in_flight", max_in_flight)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0, or None for no limit")
    if max_in_flight is not None and not isinstance(max_in_flight, int):
        raise ValueError(f"max_in_flight is {max_in_flight}; it must be a whole number")


def _policy(policy: Policy | str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if policy not in policy_names():
        raise ValueError(
            f"unknown policy {policy!r}; choose from {', '.join(policy_names())}, or pass a Policy"
        )
    return policy_preset(policy)


def _header(
    trace: Trace | RunRecord, scheduler: Scheduler, cost: CostModel | None, counters: dict[str, int]
) -> dict[str, Any]:
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
        counters=counters,
    )
