"""Where kernel tests run: on a GPU, or on the CPU in Triton's interpreter."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from pagedserve.kernels.launching import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative: two roundings to the dtype. The interpreter cuts bfloat16 off instead of rounding it."""


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@contextmanager
def nan_filled() -> Iterator[None]:
    """``torch.empty`` gives NaN, or the largest integer: what a kernel does not write is seen."""
    empty = torch.empty

    def filled(*args, **kwargs) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max)

    with mock.patch.object(torch, "empty", filled):
        yield


@contextmanager
def nothing_waits() -> Iterator[None]:
    """On a GPU torch raises for what would wait for it unasked; an event may be waited for."""
    if DEVICE.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
