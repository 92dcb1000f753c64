"""KV blocks in host memory, to and from which a preempted sequence's are copied.

Layout: [host block, layer, key or value, KV head, offset in block, head_dim], so that a block is one contiguous piece
and a run of blocks one transfer. In the cache a block is one piece a layer: those wanted are gathered into a staging
buffer on the device, and go from there in runs of consecutive host blocks; back the other way round.

On a GPU everything is put in line on the current stream, from and to page-locked memory, and the host waits for
nothing. The order is safe because only that stream ever reads or writes a host block, the staging buffer or the
cache: what a copy reads was written by work put in line before it, and what it overwrites is read by none put in
line later. So a plan's copies belong behind all earlier steps and before the plan's own forward pass, those out of
the cache before those into it, in the thread that launches both; then a block of either memory may be given to
somebody else in the very next plan.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pagedserve.kernels.kv_cache import KVCache

STAGE_BYTES = 64 << 20
"""Of the staging buffer, unless a single block is larger."""


class HostMemoryTooSmall(ValueError):
    """The host blocks asked for by ``num_cpu_blocks`` cannot be had."""


def num_staged(num_blocks: int, block_bytes: int) -> int:
    """How many blocks the staging buffer beside a cache holds, for so many host blocks."""
    return min(num_blocks, max(1, STAGE_BYTES // block_bytes))


class HostCache:
    """``num_blocks`` blocks in host memory for the blocks of a cache, in its dtype; page-locked beside a GPU.

    The cache is handed to each call and not kept, because it keeps this (``KVCache.host``). Memory starts zeroed,
    which also commits it. Raises `HostMemoryTooSmall` if it cannot be had, ``ValueError`` for a number below 1.
    """

    __slots__ = ("_stage", "data", "num_blocks")

    def __init__(self, kv: KVCache, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"host cache: num_blocks is {num_blocks}, it must be at least 1")
        shape, dtype, device = block_shape(kv), kv.data.dtype, kv.data.device
        block_bytes = int(np.prod(shape)) * dtype.itemsize
        self.num_blocks = num_blocks
        try:
            self.data = torch.zeros((num_blocks, *shape), dtype=dtype, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise HostMemoryTooSmall(
                f"num_cpu_blocks {num_blocks}: {num_blocks * block_bytes / (1 << 30):,.2f} GiB of host memory for so "
                f"many KV blocks cannot be had ({str(error).splitlines()[0]}): ask for fewer"
            ) from error
        self._stage = torch.empty((num_staged(num_blocks, block_bytes), *shape), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return self.data.numel() * self.data.element_size()

    def copy_out(self, kv: KVCache, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy ``blocks[i]`` of the cache to ``host_blocks[i]``."""
        for index, stage, runs in self._groups(blocks, host_blocks):
            torch.index_select(kv.data.transpose(0, 1), 0, index, out=stage)
            for first, host in runs:
                host.copy_(stage[first : first + len(host)], non_blocking=True)

    def copy_in(self, kv: KVCache, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy ``host_blocks[i]`` to ``blocks[i]`` of the cache."""
        for index, stage, runs in self._groups(blocks, host_blocks):
            for first, host in runs:
                stage[first : first + len(host)].copy_(host, non_blocking=True)
            kv.data.transpose(0, 1).index_copy_(0, index, stage)

    def _groups(
        self, blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[tuple[int, torch.Tensor]]]]:
        """As many blocks at a time as are staged: their ids on the device, that part of the staging buffer, and of
        each run of host blocks where it begins there and the blocks themselves.
        """
        assert len(blocks) == len(host_blocks)
        device, most = self._stage.device, len(self._stage)
        for start in range(0, len(blocks), most):
            ids = torch.tensor(blocks[start : start + most], pin_memory=device.type == "cuda")
            runs = [
                (first, self.data[host : host + count])
                for first, host, count in runs_of(host_blocks[start : start + most])
            ]
            yield ids.to(device, non_blocking=True), self._stage[: len(ids)], runs


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers: (index of the first, the first, how many)."""
    runs: list[tuple[int, int, int]] = []
    for index, number in enumerate(numbers):
        if runs and runs[-1][1] + runs[-1][2] == number:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((index, number, 1))
    return runs


def block_shape(kv: KVCache) -> tuple[int, ...]:
    """Of one block over all layers."""
    return (kv.num_layers, 2, kv.num_kv_heads, kv.block_size, kv.head_dim)
