"""Small arrays between host and device without waiting: one transfer for all of a step's, results behind an event.

A copy from ordinary memory makes the host wait for everything that the device was given before. From page-locked
memory it is put in line like a kernel; torch keeps such memory and reuses it once the copies from it are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; no dtype needs more than 8, but Triton compiles a kernel again for pointers that 16 does not divide."""


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the arrays' shapes and dtypes on ``device``, parts of one buffer there; returns at once.

    The arrays may be changed afterwards. They may have any strides, no elements or no dimensions.
    """
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = _host_buffer(end, device)
    flat, parts = host.numpy(), []
    for start, array in zip(starts, arrays, strict=True):
        part = flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        part[...] = array
        parts.append(torch.from_numpy(part))
    if device.type == "cpu":
        return parts
    return _views(host.to(device, non_blocking=True), starts, parts)


def _views(buffer: torch.Tensor, starts: Sequence[int], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What lies in the buffer at ``starts``, in the shapes and dtypes of ``parts``."""
    return [
        buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
        for start, part in zip(starts, parts, strict=True)
    ]


def _host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class _Event(Protocol):
    def synchronize(self) -> None: ...


class HostCopies:
    """Copies of a step's results on the host: asked for behind the step's work, there after `wait`.

    On a CPU the results themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: _Event | None = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's copy; not to be read before `wait`."""
        if self._device.type != "cuda":
            return tensor
        return _pinned_like(tensor).copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """All copies have been asked for: what is put in line from now on is not waited for."""
        if self._device.type == "cuda":
            self._event = _record_event(self._device)

    def wait(self) -> None:
        """Return when the copies are there."""
        if self._event is not None:
            self._event.synchronize()


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _record_event(device: torch.device) -> _Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
