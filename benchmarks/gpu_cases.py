"""A kernel at one shape: checked against its twin, then timed beside torch and what is published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_part import Part
from gpu_timing import Call, Stopwatch, ceilings

ROUNDING = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative error of all numbers together: a few roundings to the dtype."""
INTERPRETED_ROUNDING = 3e-2
"""The interpreter cuts bfloat16 off instead of rounding it."""
NEEDED_S = 4.0


@dataclass(frozen=True, slots=True)
class KernelCase:
    """``check`` returns the relative error against the twin. ``num_bytes`` and ``num_flops``: what must be done.

    ``peers``: calls that do the same. ``published_us``: a published time of another kernel at this shape.
    """

    kernel: str
    model: str
    shape: str
    check: Callable[[], float]
    run: Call
    num_bytes: int
    num_flops: int = 0
    bound: float = ROUNDING["bfloat16"]
    peers: Mapping[str, Call] = field(default_factory=dict)
    published_us: float | None = None

    @property
    def label(self) -> str:
        return f"{self.kernel}, {self.model}, {self.shape}"


def run_cases(part: Part, cases: Iterable[Callable[[], KernelCase]], table: str) -> None:
    """Check and time each; an error or a wrong result fails the part and the others go on."""
    watch = Stopwatch(part.device, 1 if part.is_tiny else 20)
    ceiling = ceilings(part.device, part.is_tiny, watch)
    part.findings.facts["ceilings"] = ceiling
    left_out = 0
    for make in cases:
        if part.left_s < NEEDED_S and not part.is_tiny:
            left_out += 1
            continue
        with part.findings.trying(getattr(make, "__name__", "a case")):
            case = make()
            with part.findings.trying(case.label):
                part.findings.add(table, _row(part, case, watch, ceiling))
        case = None  # its memory goes before the next is made
    if left_out:
        part.findings.say(f"left out: the last {left_out} kernel cases, for want of time")


def _row(part: Part, case: KernelCase, watch: Stopwatch, ceiling: Mapping[str, float]) -> dict[str, Any]:
    error = case.check()
    bound = max(case.bound, INTERPRETED_ROUNDING) if part.device == "cpu" and case.bound else case.bound
    row: dict[str, Any] = {"kernel": case.kernel, "model": case.model, "shape": case.shape}
    if not error <= bound:
        part.findings.fail(f"{case.label}: relative error {error:.2g} against its twin, allowed {bound:g}")
    row |= {"error": error if error < float("inf") else None, "bound": bound}
    calls = {"ours": case.run}
    for name, peer in case.peers.items():
        # A peer that cannot do this shape here is said so; ours is timed all the same.
        try:
            watch.medians_us({name: peer})
            calls[name] = peer
        except Exception as refused:
            part.findings.say(f"{case.label}: no {name} here: {' '.join(str(refused).split())[:160]}")
    times = watch.medians_us(calls)
    seconds = times["ours"] / 1e6
    gb_per_s, tflop_per_s = case.num_bytes / seconds / 1e9, case.num_flops / seconds / 1e12
    row |= {
        "us": times["ours"],
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / ceiling["copy_gb_per_s"],
        "tflop_per_s": tflop_per_s or None,
        "share_of_matmul": tflop_per_s / ceiling["matmul_tflop_per_s"] or None,
    }
    row |= {f"{name}_us": value for name, value in times.items() if name != "ours"}
    return row | ({} if case.published_us is None else {"published_us": case.published_us})
