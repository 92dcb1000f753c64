"""Decision identity: the simulator, given a live run's intake and times, takes the same decisions."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Policy
from pagedserve.simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class Decisions:
    """How many of a live run's steps its replay planned identically, and where the first difference lies."""

    steps_live: int
    steps_identical: int
    first_difference: str | None

    @property
    def identical(self) -> bool:
        """Whether every plan, every call and every ending agrees."""
        return self.first_difference is None


def check_decisions(live: RunRecord, policy: Policy | str, check: bool = False) -> Decisions:
    """Replay a recorded run with ``policy`` (the one it ran with) and compare every decision.

    Compared are the plans (requests, chunks, blocks, preemptions, departures), the order and time of every
    call of the four verbs, and how each request ended. ``steps_identical`` counts the leading steps of which
    the plan and the calls up to its commit agree.
    """
    if live.is_client:
        raise ValueError(
            "a client sees no decisions of its server: check the record that the engine itself wrote (kind live)"
        )
    replayed = simulate(live, policy, check=check)
    return compare_decisions(live, replayed)


def compare_decisions(live: RunRecord, replayed: RunRecord) -> Decisions:
    """Compare two records' decisions; see `check_decisions`."""
    if live.plans is None or replayed.plans is None:
        raise ValueError("both records need plans.parquet to be compared")
    steps_live = len(live.plans)
    for one, other in zip_longest(live.plans.to_pylist(), replayed.plans.to_pylist()):
        if one != other:
            step = (one or other)["step"]
            return Decisions(steps_live, step, f"step {step}: {_difference(one, other)}")
    calls, again = live.calls.to_pylist(), replayed.calls.to_pylist()
    for index, (one, other) in enumerate(zip_longest(calls, again)):
        if one != other:
            done = sum(call["kind"] == "commit" for call in calls[:index])
            return Decisions(steps_live, done, f"call {index}: live {one}, simulated {other}")
    fates = ("request", "num_output_tokens", "finish_reason", "num_preemptions", "num_recomputed_tokens")
    for one, other in zip_longest(*(r.requests.select(fates).to_pylist() for r in (live, replayed))):
        if one != other:
            return Decisions(steps_live, steps_live, f"a request's end: live {one}, simulated {other}")
    return Decisions(steps_live, steps_live, None)


def _difference(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if one is None or other is None:
        return "the live run ended" if one is None else "the simulation ended"
    name = next(name for name in one if one[name] != other[name])
    return f"{name}: live {one[name]}, simulated {other[name]}"
