"""The header of a record: what ran, under which policy and limits, in the same words for both halves."""

from dataclasses import asdict, fields
from importlib.metadata import version
from typing import Any

import pagedserve
from pagedserve.policy import Policy, Scheduler

PLAIN = (str, int, float, bool, type(None))


def run_header(
    kind: str,
    scheduler: Scheduler,
    *,
    trace: dict[str, Any],
    seed: int = 0,
    device: dict[str, Any] | None = None,
    cost: dict[str, Any] | None = None,
    packages: tuple[str, ...] = (),
    counters: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Everything of a header but the format version.

    ``kind`` is "live" or "simulated"; ``packages`` are distributions whose versions matter to the run.
    """
    return {
        "kind": kind,
        "policy": describe_policy(scheduler.policy),
        "limits": asdict(scheduler.limits),
        "overlap_depth": scheduler.overlap_depth,
        "seed": seed,
        "device": device,
        "cost": cost,
        "trace": trace,
        "versions": {"pagedserve": pagedserve.__version__, **{name: version(name) for name in packages}},
        "counters": {
            "num_preemptions": scheduler.num_preemptions,
            "num_discarded_tokens": scheduler.num_discarded_tokens,
            **(counters or {}),
        },
    }


def describe_policy(policy: Policy) -> dict[str, Any]:
    """A policy's parts and settings; a part of one's own by its class and its plain public settings."""
    described: dict[str, Any] = {}
    for name in (field.name for field in fields(policy)):
        value = getattr(policy, name)
        if not isinstance(value, PLAIN):
            public = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
            plain = {k: v for k, v in public.items() if isinstance(v, PLAIN)}
            value = {"class": type(value).__qualname__, **plain}
        described[name] = value
    return described
