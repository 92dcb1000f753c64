"""Where Triton kernels can run, and small sums for their launches."""

from __future__ import annotations

import torch

INTERPRETED_SMS = 8
"""Processors that a CPU is taken to have under the interpreter; a few, so that small tests split too."""


class CannotLaunch(ValueError):
    """Triton is not there, or cannot run on the device."""


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, in this process. Raises `CannotLaunch` without Triton."""
    try:
        from triton import knobs
    except ImportError as error:
        raise CannotLaunch(
            "attention 'triton' needs Triton, which is not installed: pip install 'triton>=3.6,<4', or use 'auto'"
        ) from error
    return bool(knobs.runtime.interpret)


def check_can_launch(device: torch.device) -> None:
    """Raise `CannotLaunch` where no kernel can run: on a CPU without the interpreter, or without Triton."""
    if not is_interpreted() and device.type != "cuda":
        raise CannotLaunch(
            f"attention 'triton' cannot run on device {str(device)!r}: use a CUDA device, or 'auto'; "
            "TRITON_INTERPRET=1 in the environment interprets the kernels, slowly, for tests"
        )


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number`` >= 1."""
    return 1 << (number - 1).bit_length()
