"""How many KV blocks there are: on a GPU what is left of its memory, on a CPU what the requests could use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve.engine.largest_step import largest_step
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.placement import available_bytes
from pagedserve.engine.parallel.ranks import Largest
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import sample
from pagedserve.policy import Limits

KV_SHARE_OF_MEMORY = 0.3
GIB = 1 << 30
DEFAULT_KV_BYTES = GIB
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


class PoolTooLarge(ValueError):
    """The KV blocks asked for by ``num_blocks`` need more memory than is free."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU. in_use: by weights, other processes and the driver; step_peak: what a step adds to it."""

    total: int
    in_use: int
    step_peak: int

    def num_blocks(self, utilization: float, block_bytes: int, needed: int) -> int:
        """KV blocks that ``utilization`` of the memory leaves room for.

        ValueError unless there are ``needed``, those of one sequence of full length.
        """
        left = int(self.total * utilization) - self.in_use - self.step_peak
        blocks = left // block_bytes - 1  # one more is kept that is always zero
        if blocks < needed:
            raise ValueError(
                f"{utilization:g} of {self.total / GIB:.2f} GiB, less {self.in_use / GIB:.2f} in use and "
                f"{self.step_peak / GIB:.2f} for a step, leaves room for {max(0, blocks)} KV blocks; one sequence of "
                f"full length takes {needed}: lower max_model_len or max_num_batched_tokens, or raise "
                "gpu_memory_utilization"
            )
        return blocks

    def __str__(self) -> str:
        in_use, peak = self.in_use / GIB, self.step_peak / GIB
        return f"{self.total / GIB:.1f} GiB of memory, {in_use:.1f} in use before, {peak:.1f} for a step"


def measure_device(model: Model, limits: Limits) -> DeviceMemory:
    """Run one step as large as the limits allow, on a CUDA device, and see what it takes."""
    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model.ranks.send(Largest(limits))
    sample_all(model, limits, largest_step(model, limits))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return DeviceMemory(total, total - free, peak)


def sample_all(model: Model, limits: Limits, logits: torch.Tensor) -> None:
    """Choose a token of each row by the filter that takes most scratch."""
    rows = SamplingRows(model.config.vocab_size, model.device)
    for row in range(limits.max_num_seqs):
        rows.add(row, SamplingParams(top_p=0.9), seed=row, prompt_ids=())
    with torch.inference_mode():
        batch = rows.select(tuple(range(limits.max_num_seqs)), [1] * limits.max_num_seqs)
        sample(logits, batch).errors()


def default_num_blocks(model: Model, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Blocks for ``max_num_seqs`` sequences of full length, within `DEFAULT_KV_BYTES` and the free memory.

    One sequence of full length always gets its blocks, if they fit a third of the free memory.
    """
    one = -(-max_model_len // block_size)
    block_bytes = block_bytes_of(model, block_size)
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
    block_bytes, free = block_bytes_of(model, block_size), available_bytes(model.device)
    if free is not None and num_blocks * block_bytes > free:
        raise PoolTooLarge(
            f"num_blocks {num_blocks}: so many KV blocks of {block_size} tokens need "
            f"{num_blocks * block_bytes / GIB:,.2f} GiB and {free / GIB:,.2f} GiB are free: at most "
            f"{free // block_bytes} would fit; leave it out for a good number"
        )


def block_bytes_of(model: Model, block_size: int) -> int:
    """Bytes of one KV block over all layers, on this rank."""
    return model.local.kv_bytes_per_token(model.kv_dtype.itemsize) * block_size
