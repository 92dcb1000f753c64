"""Profiles made from formulas, so that what a cost model should answer is known."""

from collections.abc import Callable
from dataclasses import asdict

from pagedserve.engine.profile_grid import Grid, Point
from pagedserve.metrics.profile import SWAP_DIRECTIONS, HostPoint, Profile, StepPoint, SwapPoint
from pagedserve.policy import Limits, StepShape

LIMITS = Limits(max_num_batched_tokens=128, max_num_seqs=16, max_model_len=600, block_size=16, num_blocks=200)
GRID = Grid((1, 16, 64, 128), (0, 128, 512), (1, 4, 8), (16, 256), (16, 64), (2, 3), (1, 8))


def formula_ns(shape: StepShape) -> int:
    """A device on which every part of a step is linear."""
    tokens = sum(n for n, _ in shape.chunks) + shape.num_decodes
    context = sum(n * c for n, c in shape.chunks)
    head = 5_000_000 if shape.num_samples else 0
    extra = 700_000 * max(0, len(shape.chunks) - 1)
    return 20_000_000 + 800_000 * tokens + 2_000 * context + 3_000 * shape.decode_context_sum + head + extra


def profile_of(
    time_ns: Callable[[StepShape], int] = formula_ns,
    grid: Grid = GRID,
    limits: Limits = LIMITS,
    swap_ns: Callable[[str, int], int] | None = None,
) -> Profile:
    """What the profiler would have written on a device without noise; without ``swap_ns`` as before it swapped."""

    def measured(point: Point) -> StepPoint:
        ns = time_ns(point.shape)
        return StepPoint(point.kind, point.shape, ns * 9 // 10, ns, ns * 12 // 10, 5)

    points, rows = grid.fitting(limits)
    host = tuple(HostPoint(n, 90_000 + 9_000 * n, 100_000 + 10_000 * n, 200_000, 5) for n in rows)
    swaps = [
        SwapPoint(way, count, ns * 9 // 10, ns, ns * 12 // 10, 5)
        for way in SWAP_DIRECTIONS
        for count in grid.swap_blocks
        if swap_ns is not None and (ns := swap_ns(way, count))
    ]
    provenance = {"device_name": "a formula", "limits": asdict(limits)}
    return Profile(provenance, tuple(measured(point) for point in points), host, tuple(swaps))
