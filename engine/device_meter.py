"""What a device says of its memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Protocol

import torch


class Meter(Protocol):
    """Of one device, in bytes."""

    def settle(self) -> None:
        """Wait for the device, give back what no tensor holds, and begin to look for a peak."""
        ...

    def total_bytes(self) -> int:
        """All that there are."""
        ...

    def free_bytes(self) -> int:
        """Those that nobody has taken, in this process or another."""
        ...

    def allocated_bytes(self) -> int:
        """Those of this process's tensors."""
        ...

    def peak_bytes(self) -> int:
        """The most that its tensors had since `settle`; waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMeter:
    """See `Meter`."""

    device: torch.device

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


def meter_of(device: torch.device) -> Meter | None:
    """A CUDA device's; None for others, whose memory is not planned by measuring."""
    return CudaMeter(device) if device.type == "cuda" else None
