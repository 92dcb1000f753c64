"""Times of single kernels on a device, and the two ceilings that they are compared with.

On CUDA every call is recorded as a graph, so that the host's launches are not timed; before each replay a buffer
larger than the L2 cache is written, so that inputs come from memory; calls that are compared take turns; medians
of CUDA events. On a CPU, for rehearsals, it is the wall clock, and the numbers mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton import knobs

Call = Callable[[], object]
FLUSHED_BYTES = 1 << 28
WARM_UPS = 3


class Stopwatch:
    """Medians of calls on one device, in microseconds."""

    def __init__(self, device: str, repeats: int) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._repeats = repeats
        if self._is_cuda:
            self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def medians_us(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """The median time of each call, the calls in turns."""
        if not self._is_cuda:
            times = {name: [_wall_us(call) for _ in range(self._repeats)] for name, call in calls.items()}
            return {name: statistics.median(each) for name, each in times.items()}
        graphs = {name: _recorded(call) for name, call in calls.items()}
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
        for _ in range(self._repeats):
            for name, graph in graphs.items():
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._flushed.zero_()
                pair[0].record()
                graph.replay()
                pair[1].record()
                events[name].append(pair)
        torch.cuda.synchronize()
        return {
            name: statistics.median(1e3 * first.elapsed_time(last) for first, last in pairs)
            for name, pairs in events.items()
        }


def _recorded(call: Call) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _wall_us(call: Call) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def ceilings(device: str, is_tiny: bool, watch: Stopwatch) -> dict[str, float]:
    """``copy_gb_per_s``: of a large copy, bytes read and written; ``matmul_tflop_per_s``: of a square product."""
    size, width = (1 << 20, 64) if is_tiny else (1 << 32, 8192)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    copied_us = _copied_us(size, device, watch)
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    multiplied_us = watch.medians_us({"matmul": lambda: torch.mm(left, right, out=out)})["matmul"]
    return {
        "copy_gb_per_s": 2 * size / copied_us / 1e3,
        "matmul_tflop_per_s": 2 * width**3 / multiplied_us / 1e6,
        "matmul_width": width,
        "copied_bytes": 2 * size,
    }


def _copied_us(size: int, device: str, watch: Stopwatch) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return watch.medians_us({"copy": lambda: target.copy_(source)})["copy"]


@contextmanager
def nan_filled() -> Iterator[None]:
    """``torch.empty`` gives NaN, or the largest integer: what a kernel does not write is seen."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max)

    with mock.patch.object(torch, "empty", filled):
        yield


@dataclass(slots=True)
class CompilesState:
    """Kernels that Triton compiled, not those that it found in its cache on disk."""

    num: int = 0
    seconds: float = 0.0

    def heard(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """As Triton tells it; ``times.total`` is in microseconds."""
        if not cache_hit:
            self.num += 1
            self.seconds += times.total / 1e6


@contextmanager
def compiles() -> Iterator[CompilesState]:
    """What is compiled inside: time in which a device waits, and which does not belong to what is measured."""
    found, before = CompilesState(), knobs.compilation.listener
    knobs.compilation.listener = found.heard
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, of all numbers together in float64; infinite where one is not finite."""
    if not bool(torch.isfinite(found.float()).all()):
        return float("inf")
    wide, right = found.double(), expected.double()
    return float((wide - right).norm() / right.norm().clamp(min=1e-30))
