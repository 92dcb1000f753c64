"""The numbers that the KV cache holds."""

from __future__ import annotations

import torch

KV_CACHE_DTYPES = ("auto", "fp8")


def choose_kv_dtype(requested: str, attention: str, dtype: torch.dtype) -> torch.dtype:
    """The model's dtype, or bytes of e4m3 (``kernels/fp8.py``). ValueError for what the backend cannot read."""
    if requested == "auto":
        return dtype
    if requested != "fp8":
        raise ValueError(f"kv_cache_dtype is {requested!r}; there are: {', '.join(KV_CACHE_DTYPES)}")
    if attention != "triton":
        raise ValueError(
            f"kv_cache_dtype is fp8, which attention {attention!r} cannot read: use attention triton, or auto here"
        )
    return torch.uint8
