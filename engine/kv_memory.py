"""How many KV blocks there are: on a GPU what is left of its memory, on a CPU what the requests could use.

On GPUs every rank measures its own device, and the one with the least room decides for all: what is in use once a
step has run, what such a step adds at its peak (`largest_step`), and what recorded decode steps keep
(`graph_memory`). The rest of the share that may be taken becomes blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from pagedserve.engine.device_meter import Meter, meter_of
from pagedserve.engine.graph_memory import graph_bytes
from pagedserve.engine.largest_step import largest_step
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.placement import available_bytes
from pagedserve.engine.parallel.ranks import Largest
from pagedserve.kernels.host_cache import num_staged
from pagedserve.policy import Limits

KV_SHARE_OF_MEMORY = 0.3
GIB = 1 << 30
DEFAULT_KV_BYTES = GIB
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


class PoolTooLarge(ValueError):
    """The KV blocks asked for by ``num_blocks`` need more memory than is free."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU. in_use: by weights, loaded kernels, other processes and the driver.

    step: what the largest step adds at its peak; graphs: what recorded decode steps keep; copies: what those to host
    memory go through.
    """

    total: int
    in_use: int
    step: int
    graphs: int = 0
    copies: int = 0

    def left(self, utilization: float) -> int:
        """Bytes for KV blocks, which may be below zero."""
        return int(self.total * utilization) - self.in_use - self.step - self.graphs - self.copies

    def words(self, utilization: float) -> str:
        """All of the numbers."""
        each = (self.total, self.in_use, self.step, self.graphs, self.left(utilization))
        total, in_use, step, graphs, left = (f"{number / GIB:.2f}" for number in each)
        copies = f" and {self.copies / GIB:.2f} for copies to the host" if self.copies else ""
        return (
            f"{utilization:g} of {total} GiB, less {in_use} in use, {step} for a step and {graphs} for graphs"
            f"{copies}, leaves {left}"
        )


def fit_blocks(
    ranks: Sequence[DeviceMemory], utilization: float, block_bytes: int, needed: int
) -> tuple[int, str]:
    """KV blocks of ``block_bytes`` that every rank has room for, and why so many.

    One more is kept that is always zero. ValueError unless there are ``needed``, those of one sequence of full
    length.
    """
    rank = min(range(len(ranks)), key=lambda index: ranks[index].left(utilization))
    tightest = ranks[rank]
    blocks = tightest.left(utilization) // block_bytes - 1
    whose = f"rank {rank} has the least room: " if len(ranks) > 1 else ""
    words = f"{whose}{tightest.words(utilization)}"
    if blocks < needed:
        raise ValueError(
            f"{words}: room for {max(0, blocks)} KV blocks; one sequence of full length takes {needed}: lower "
            "max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    return blocks, words


def plan_num_blocks(
    model: Model,
    limits: Limits,
    asked: int | None,
    utilization: float | None,
    num_host_blocks: int = 0,
    *,
    has_graphs: bool,
) -> tuple[int, str]:
    """KV blocks, as ``asked`` for or as many as are good, and where the number comes from.

    ``has_graphs``: decode steps will be recorded where the device can. ``num_host_blocks``: KV blocks in host memory
    that some are copied to. ValueError names what is too large, or an
    option that has no place here.
    """
    meter = meter_of(model.device)
    if utilization is not None and (meter is None or asked is not None):
        beside = "num_blocks, which says the number" if asked is not None else f"device {model.device}"
        raise ValueError(f"gpu_memory_utilization is {utilization:g} beside {beside}: leave one of them out")
    if asked is not None:
        check_num_blocks(model, asked, limits.block_size)
        return asked, ""
    if meter is None:
        return default_num_blocks(model, limits.max_model_len, limits.max_num_seqs, limits.block_size), ""
    model.ranks.send(Largest(limits))
    memories = measure_ranks(model, limits, meter, has_graphs=has_graphs)
    share = DEFAULT_GPU_MEMORY_UTILIZATION if utilization is None else utilization
    needed, block_bytes = (
        -(-limits.max_model_len // limits.block_size),
        block_bytes_of(model, limits.block_size),
    )
    copies = num_staged(num_host_blocks, block_bytes) * block_bytes
    return fit_blocks([replace(each, copies=copies) for each in memories], share, block_bytes, needed)


def measure_ranks(
    model: Model, limits: Limits, meter: Meter, *, has_graphs: bool
) -> tuple[DeviceMemory, ...]:
    """What every rank's device holds, in order; every rank calls it."""
    own = torch.tensor(
        astuple(measure_device(model, limits, meter, has_graphs=has_graphs)), device=model.device
    )
    return tuple(DeviceMemory(*numbers) for numbers in model.communicator.all(own).tolist())


def measure_device(model: Model, limits: Limits, meter: Meter, *, has_graphs: bool) -> DeviceMemory:
    """Run the largest step on this rank's device and record decode steps; what they take."""
    meter.settle()
    largest_step(model, limits)
    peak = meter.peak_bytes()
    # What stays after a step, such as a library's workspace and loaded kernels, is in use, and not twice in the sum.
    meter.settle()
    step, in_use = peak - meter.allocated_bytes(), meter.total_bytes() - meter.free_bytes()
    graphs = graph_bytes(model, limits, meter) if has_graphs else 0
    return DeviceMemory(meter.total_bytes(), in_use, max(0, step), graphs)


def default_num_blocks(model: Model, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Blocks for ``max_num_seqs`` sequences of full length, within `DEFAULT_KV_BYTES` and the free memory.

    One sequence of full length always gets its blocks, if they fit a third of the free memory.
    """
    one = -(-max_model_len // block_size)
    block_bytes = _machine_block_bytes(model, block_size)
    wanted = min(max_num_seqs * one, max(one, DEFAULT_KV_BYTES // block_bytes))
    free = available_bytes(model.device)
    if free is None:
        return wanted
    fits = int(free * KV_SHARE_OF_MEMORY) // block_bytes
    if fits < 1:
        raise ValueError(f"{free:,} bytes are free and one KV block takes {block_bytes:,}: free some memory")
    return min(wanted, fits)


def check_num_blocks(model: Model, num_blocks: int, block_size: int) -> None:
    """Raise `PoolTooLarge` if the free memory does not hold so many KV blocks."""
    block_bytes, free = _machine_block_bytes(model, block_size), available_bytes(model.device)
    if free is not None and num_blocks * block_bytes > free:
        raise PoolTooLarge(
            f"num_blocks {num_blocks}: so many KV blocks of {block_size} tokens need "
            f"{num_blocks * block_bytes / GIB:,.2f} GiB and {free / GIB:,.2f} GiB are free: at most "
            f"{free // block_bytes} would fit; leave it out for a good number"
        )


def _machine_block_bytes(model: Model, block_size: int) -> int:
    """Bytes of one KV block in the memory that is asked: that of a GPU, or of a CPU that all ranks share."""
    return block_bytes_of(model, block_size) * (model.ranks.size if model.device.type == "cpu" else 1)


def block_bytes_of(model: Model, block_size: int) -> int:
    """Bytes of one KV block over all layers, on this rank."""
    return model.local.kv_bytes_per_token(model.kv_dtype.itemsize) * block_size
