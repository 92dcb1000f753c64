"""What a policy is made of, and the names under which the built-in parts are found."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from pagedserve.policy.batching import BatchingRule, Mixed, PrefillFirst, Serial, Static
from pagedserve.policy.blocks import Allocator, PagedAllocator
from pagedserve.policy.contiguous import ContiguousLimit, ContiguousMax
from pagedserve.policy.orders import AdmissionOrder, Fcfs, Newest, VictimRule
from pagedserve.policy.swap import PreemptionMode, Recompute, SwapToHost

PARTS: dict[str, dict[str, Callable[[], Any]]] = {
    "batching": {"serial": Serial, "static": Static, "prefill_first": PrefillFirst, "mixed": Mixed},
    "order": {"fcfs": Fcfs},
    "victim": {"newest": Newest},
    "preemption_mode": {"recompute": Recompute, "swap": SwapToHost},
    "allocator": {
        "paged": PagedAllocator,
        "contiguous_max": ContiguousMax,
        "contiguous_limit": ContiguousLimit,
    },
}
PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Policy:
    """A composition of rules; a specification, never changed by a run (every run works on a deep copy).

    Each part is a built-in name or an object of one's own. ``watermark`` is the share of the pool that an
    admission must leave free while others run. ``scheduler_reserve_full_isl`` (vLLM's name): admission needs
    free blocks for all known tokens, otherwise only for the first chunk. A victim gives up its blocks and
    resumes at the front of the queue; ``preemption_mode`` says whether it then computes its tokens again or
    finds them in host memory.
    """

    batching: str | BatchingRule = "mixed"
    order: str | AdmissionOrder = "fcfs"
    victim: str | VictimRule = "newest"
    preemption_mode: str | PreemptionMode = "recompute"
    allocator: str | Allocator = "paged"
    watermark: float = 0.01
    scheduler_reserve_full_isl: bool = True
    enable_prefix_caching: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark is {self.watermark}; it is a share of the pool, from 0 to below 1")
        for kind, known in PARTS.items():
            value = getattr(self, kind)
            if isinstance(value, str) and value not in known:
                raise ValueError(
                    f"unknown {kind} {value!r}; choose from {', '.join(known)}, or pass an object"
                )

    def part(self, kind: str) -> Any:
        """A fresh built-in part of that kind, or the object given."""
        value = getattr(self, kind)
        return PARTS[kind][value]() if isinstance(value, str) else value

    @property
    def can_swap(self) -> bool:
        """Whether a victim's KV may ever be copied to host memory."""
        return not isinstance(self.part("preemption_mode"), Recompute)


PRESETS: dict[str, Policy] = {
    **{rule: Policy(batching=rule, name=rule) for rule in PARTS["batching"]},
    # vLLM V1: running requests first, whole-prompt gate, no watermark, prefix caching on.
    "vllm_v1": Policy(batching="mixed", watermark=0.0, enable_prefix_caching=True, name="vllm_v1"),
}


def policy_names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(PRESETS)


def policy(preset: str, **changes: Any) -> Policy:
    """A preset with changes, as in ``policy("mixed", allocator="contiguous_max")``.

    Contiguous allocators share nothing and grow nothing, so naming one turns prefix caching and watermark
    off unless they were asked for. ValueError lists the presets or settings when a name is unknown.
    """
    known = [field.name for field in fields(Policy)]
    if preset not in PRESETS:
        raise ValueError(f"unknown policy {preset!r}; choose from {', '.join(PRESETS)}")
    for name in changes.keys() - set(known):
        raise ValueError(f"unknown policy setting {name!r}; choose from {', '.join(known)}")
    parts = [f"{k}={v if isinstance(v, PLAIN) else type(v).__name__}" for k, v in changes.items()]
    if str(changes.get("allocator")).startswith("contiguous"):
        changes = {"enable_prefix_caching": False, "watermark": 0.0, **changes}
    changes.setdefault("name", " ".join([preset, *parts]))
    return replace(PRESETS[preset], **changes)
