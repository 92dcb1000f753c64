"""Rows in groups that bound the scratch space of what is done to them; no result depends on the grouping."""

from collections.abc import Iterator

from torch import Tensor

# Scratch integers per tensor. On a CPU few enough that the allocator keeps the memory at hand, instead of mapping
# and clearing it in each step, which takes longer than the work; elsewhere 128 MiB.
MAX_SCRATCH = {"cpu": 1 << 18}
MAX_SCRATCH_ELSEWHERE = 1 << 24


def row_groups(first: int, end: int, logits: Tensor) -> Iterator[slice]:
    """Slices that cover first .. end, for rows as long as those of logits [R, V] and on their device."""
    scratch = MAX_SCRATCH.get(logits.device.type, MAX_SCRATCH_ELSEWHERE)
    size = max(1, scratch // logits.shape[-1])
    for start in range(first, end, size):
        yield slice(start, min(start + size, end))
