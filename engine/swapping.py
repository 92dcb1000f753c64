"""The copies of a plan between the KV cache and host memory, and the blocks for them there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from pagedserve.engine.host_memory import HostMemory
from pagedserve.engine.kv_memory import GIB, block_bytes_of
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.placement import available_bytes
from pagedserve.kernels.host_cache import HostCache, HostMemoryTooSmall
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits, StepPlan, Swap

MOST_OF_FREE = 0.8
"""Of the free host memory: it is committed at once, and a machine without any left stands still."""


def host_cache_of(kv: KVCache, limits: Limits) -> HostCache | None:
    """The host blocks beside a cache: those that it has from an engine before, or new ones; None if there are none.

    Raises `HostMemoryTooSmall`.
    """
    wanted = limits.num_cpu_blocks
    if wanted and (kv.host is None or kv.host.num_blocks != wanted):
        kv.host = None  # its memory is free before more is asked for
        kv.host = HostCache(kv, wanted)
    return kv.host if wanted else None


def run_swaps(kv: KVCache, host: HostCache, plan: StepPlan) -> None:
    """A plan's copies: behind all earlier steps, before its own tokens; see `pagedserve.kernels.host_cache`."""
    if plan.swapped_out:
        host.copy_out(kv, *_blocks(plan.swapped_out))
    if plan.swapped_in:
        host.copy_in(kv, *_blocks(plan.swapped_in))


def _blocks(swaps: Sequence[Swap]) -> tuple[list[int], list[int]]:
    """Blocks of the pool, and of host memory."""
    return (
        list(chain.from_iterable([swap.blocks for swap in swaps])),
        list(chain.from_iterable([swap.host_blocks for swap in swaps])),
    )


def planned_cpu_blocks(model: Model, limits: Limits, asked: HostMemory) -> int:
    """Host blocks for the model's engine, beside the KV blocks of ``limits``, which a model on a CPU has there too.

    ValueError as `HostMemory.num_blocks`; `HostMemoryTooSmall` if the free memory does not hold them, on all ranks.
    """
    block_bytes = block_bytes_of(model, limits.block_size)
    wanted, free = asked.num_blocks(block_bytes), available_bytes("cpu")
    if wanted and free is not None:
        each = block_bytes * model.ranks.size
        left = int(free * MOST_OF_FREE) - (limits.num_blocks * each if model.device.type == "cpu" else 0)
        if wanted * each > left:
            raise HostMemoryTooSmall(
                f"num_cpu_blocks {wanted}: so many KV blocks of {limits.block_size} tokens need "
                f"{wanted * each / GIB:,.2f} GiB of host memory and {max(0, left) / GIB:,.2f} GiB are left of the "
                f"{MOST_OF_FREE:.0%} that may be taken of what is free: at most {max(0, left) // each} would fit"
            )
    return wanted
