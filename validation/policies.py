"""Several policies on the same traffic, each simulated and live: what a policy is worth, and how well foretold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from pagedserve.metrics.profile import Profile
from pagedserve.policy import Policy
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.traces.trace import Trace
from pagedserve.validation.planning import Setting, Traffic, plan_traffic
from pagedserve.validation.validate import LiveBench, Progress, Validation, validate


def shared_traffic(
    trace: Trace,
    policies: Mapping[str, Policy],
    reference: str,
    setting: Setting,
    profile: Profile,
    *,
    load: float,
    run_s: float,
) -> Traffic:
    """Lengths and rate fitted for the policy labelled ``reference``; the same requests then go to all.

    ``setting`` gives limits and depth. A run of the reference policy takes about ``run_s`` seconds.
    """
    own = replace(setting, policy=policies[reference])
    return plan_traffic(trace, own, MeasuredCost(profile), load=load, fit=True, run_s=run_s)


def validated(
    bench: LiveBench,
    policies: Mapping[str, Policy],
    traffic: Traffic,
    setting: Setting,
    profile: Profile,
    *,
    seed: int = 0,
    progress: Callable[[str], Progress | None] | None = None,
) -> Iterator[tuple[str, Validation]]:
    """One policy after the other, as its validation is done."""
    for label, policy in policies.items():
        told = None if progress is None else _labelled(label, progress)
        yield (
            label,
            validate(bench, traffic, replace(setting, policy=policy), profile, seed=seed, progress=told),
        )


def _labelled(label: str, progress: Callable[[str], Progress | None]) -> Callable[[str], Progress | None]:
    return lambda _: progress(f"{label}, live")
