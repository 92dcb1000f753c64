"""Whether a profile speaks of the engine that is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedserve.engine.engine import Engine
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.profiler import provenance_of
from pagedserve.metrics.profile import Profile

MUST_AGREE = ("geometry", "device_name", "dtype", "attention", "num_threads")
MUST_AGREE += ("kv_cache_dtype", "tensor_parallel_size", "has_graphs")
UNSAID = {"kv_cache_dtype": "auto", "tensor_parallel_size": 1, "has_graphs": False}
"""What a profile means that is older than the word for it."""
GEOMETRY = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def check_profile(profile: Profile, engine: Engine) -> None:
    """Raise ValueError naming what differs if the profile was measured on another model, device or dtype.

    Limits may differ: what lies outside the measured shapes is extrapolated and counted.
    """
    here, there = provenance_of(engine), profile.provenance
    differing = [
        f"{name} {_shown(there.get(name, UNSAID.get(name)))} in the profile, {_shown(here[name])} here"
        for name in MUST_AGREE
        if _shown(there.get(name, UNSAID.get(name))) != _shown(here[name])
    ]
    if differing:
        raise ValueError(
            f"the profile was measured on something else ({'; '.join(differing)}): measure here with "
            "'pagedserve profile'"
        )


def check_geometry(profile: Profile, config: ModelConfig) -> None:
    """Raise ValueError naming what differs if the profile was measured on a model of another geometry."""
    there = profile.provenance.get("geometry")
    here = {name: getattr(config, name) for name in GEOMETRY}
    if not isinstance(there, Mapping):
        raise ValueError("the profile does not say on which model it was measured: measure again")
    differing = [
        f"{name} {there.get(name)} in the profile, {here[name]} here"
        for name in GEOMETRY
        if there.get(name) != here[name]
    ]
    if differing:
        raise ValueError(
            f"the profile was measured on another model ({profile.provenance.get('model')}: "
            f"{'; '.join(differing)}): name that one, or measure this one with 'pagedserve profile'"
        )


def _shown(value: Any) -> str:
    """A geometry as its numbers that matter to time."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value.get(name)}" for name in GEOMETRY if name in value)
    return str(value)
