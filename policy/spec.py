"""What a policy is made of, and the names under which the built-in parts are found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from pagedserve.policy.batching import BatchingRule, Mixed, PrefillFirst, Serial, Static
from pagedserve.policy.blocks import Allocator, PagedAllocator
from pagedserve.policy.contiguous import ContiguousLimit, ContiguousMax
from pagedserve.policy.orders import AdmissionOrder, Fcfs, Newest, VictimRule

PARTS: dict[str, dict[str, Callable[[], Any]]] = {
    "batching": {"serial": Serial, "static": Static, "prefill_first": PrefillFirst, "mixed": Mixed},
    "order": {"fcfs": Fcfs},
    "victim": {"newest": Newest},
    "allocator": {
        "paged": PagedAllocator,
        "contiguous_max": ContiguousMax,
        "contiguous_limit": ContiguousLimit,
    },
}


@dataclass(frozen=True, slots=True)
class Policy:
    """A composition of rules; a specification, never changed by a run (every run works on a deep copy).

    Each part is a built-in name or an object of one's own. ``watermark`` is the share of the pool that an
    admission must leave free while others run. ``scheduler_reserve_full_isl`` (vLLM's name): admission needs
    free blocks for all known tokens, otherwise only for the first chunk. Preemption is by recomputation:
    a victim gives up its blocks and resumes at the front of the queue.
    """

    batching: str | BatchingRule = "mixed"
    order: str | AdmissionOrder = "fcfs"
    victim: str | VictimRule = "newest"
    allocator: str | Allocator = "paged"
    watermark: float = 0.01
    scheduler_reserve_full_isl: bool = True
    enable_prefix_caching: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark is {self.watermark}; it is a share of the pool, from 0 to below 1")
        for kind in PARTS:
            part_class(kind, getattr(self, kind))

    def part(self, kind: str) -> Any:
        """A fresh built-in part of that kind, or the object given."""
        value = getattr(self, kind)
        return PARTS[kind][value]() if isinstance(value, str) else value

    def describe(self) -> dict[str, Any]:
        """Names and settings, for a record's header: parts by registered name or by class and its settings."""
        described: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in PARTS}
        for kind in PARTS:
            value = getattr(self, kind)
            described[kind] = value if isinstance(value, str) else _describe_object(value)
        return described


def part_class(kind: str, value: object) -> type:
    """The class of a part; ValueError lists the names when a name is unknown."""
    if not isinstance(value, str):
        return type(value)
    if value not in PARTS[kind]:
        raise ValueError(f"unknown {kind} {value!r}; choose from {', '.join(PARTS[kind])}, or pass an object")
    return PARTS[kind][value]().__class__


def _describe_object(value: object) -> dict[str, Any]:
    if is_dataclass(value):
        settings: Mapping[str, Any] = {f.name: getattr(value, f.name) for f in fields(value)}
    else:
        settings = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
    plain = {k: v for k, v in settings.items() if isinstance(v, str | int | float | bool | None)}
    return {"class": type(value).__qualname__, **plain}


PRESETS: dict[str, Policy] = {
    "serial": Policy(batching="serial", name="serial"),
    "static": Policy(batching="static", name="static"),
    "prefill_first": Policy(batching="prefill_first", name="prefill_first"),
    "mixed": Policy(batching="mixed", name="mixed"),
    # vLLM V1: running requests first, whole prompt gate, no watermark, prefix caching on.
    "vllm_v1": Policy(
        batching="mixed",
        watermark=0.0,
        scheduler_reserve_full_isl=True,
        enable_prefix_caching=True,
        name="vllm_v1",
    ),
}


def policy_names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(PRESETS)


def policy(preset: str, **changes: Any) -> Policy:
    """A preset with changes, as in ``policy("mixed", allocator="contiguous_max")``.

    Contiguous allocators cannot share blocks, so choosing one turns prefix caching off unless it was asked
    for. ValueError lists the presets or fields when a name is unknown.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown policy {preset!r}; choose from {', '.join(PRESETS)}")
    known = [f.name for f in fields(Policy)]
    for name in changes:
        if name not in known:
            raise ValueError(f"unknown policy setting {name!r}; choose from {', '.join(known)}")
    if changes.get("allocator", "paged") != "paged" and isinstance(changes["allocator"], str):
        changes.setdefault("enable_prefix_caching", False)
    parts = [f"{k}={v if isinstance(v, str | int | float) else type(v).__name__}" for k, v in changes.items()]
    changes.setdefault("name", " ".join([preset, *parts]))
    return replace(PRESETS[preset], **changes)
