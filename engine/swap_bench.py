"""Times copies of KV blocks between a cache and host memory: what swapping costs a step."""

from __future__ import annotations

import random
import time

import torch

from pagedserve.engine.model.placement import available_bytes
from pagedserve.kernels.host_cache import HostCache, block_shape
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.metrics.profile import SWAP_DIRECTIONS

MOST_BYTES = 512 << 20
SHARE_OF_FREE = 0.25


class SwapBench:
    """Copies of a cache's blocks, out and in, with host memory of its own; the cache's content is overwritten.

    Blocks lie anywhere in the cache, as those of a sequence do, and side by side on the host.
    """

    def __init__(self, kv: KVCache, counts: tuple[int, ...]) -> None:
        """``counts``: of blocks to be copied at once, as far as cache and host memory hold so many."""
        block_bytes = torch.Size(block_shape(kv)).numel() * kv.data.element_size()
        free = available_bytes("cpu")
        most_bytes = MOST_BYTES if free is None else min(MOST_BYTES, int(free * SHARE_OF_FREE))
        most = min(kv.num_blocks, most_bytes // block_bytes)
        self.counts = tuple(count for count in counts if count <= most)
        self._kv = kv
        self._host = HostCache(kv, max(self.counts)) if self.counts else None
        self._blocks = random.Random(0).sample(range(kv.num_blocks), max(self.counts, default=0))

    @property
    def cases(self) -> list[tuple[str, int]]:
        """Every direction with every count."""
        return [(direction, count) for direction in SWAP_DIRECTIONS for count in self.counts]

    def measure(self, direction: str, count: int) -> int:
        """Nanoseconds from the first call until the blocks are there, with nothing else on the device."""
        assert self._host is not None
        copy = self._host.copy_out if direction == "out" else self._host.copy_in
        self._synchronize()
        start = time.perf_counter_ns()
        copy(self._kv, self._blocks[:count], range(count))
        self._synchronize()
        return time.perf_counter_ns() - start

    def _synchronize(self) -> None:
        if self._kv.data.is_cuda:
            torch.cuda.synchronize(self._kv.data.device)
