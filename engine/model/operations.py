"""What a layer does between its matrix products, in one of two ways: torch's operations, or our kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.layers import rms_norm, silu_and_multiply
from pagedserve.engine.model.rope import RotaryTable, rotate
from pagedserve.kernels.kv_cache import KVCache

HeadNorms = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the norms of query heads and of key heads (Qwen3)."""


class Operations(Protocol):
    """One way to do them. ``prepare`` runs once a step; its result goes to ``rotate_and_write``."""

    def prepare(self, batch: ForwardBatch, kv: KVCache) -> Any:
        """Work out what all layers share."""
        ...

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Root-mean-square norm of rows [T, n], after ``delta``, if there is one, was added to them in place."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, n], for [T, 2n]."""
        ...

    def rotate_and_write(
        self, projected: torch.Tensor, norms: HeadNorms | None, kv: KVCache, index: int, plan: Any
    ) -> torch.Tensor:
        """Norm and rotate query and key heads, write keys and values to layer ``index``, return the queries.

        projected: [T, H + 2 KVH, D], query, key and value heads of each token; may be written to.
        """
        ...


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Cache rows [T, 2 KVH], and cosines and sines [T, 1, D / 2]."""

    rows: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchOperations:
    """See `Operations`. On any device."""

    rotary: RotaryTable
    eps: float

    def prepare(self, batch: ForwardBatch, kv: KVCache) -> TorchPlan:
        return TorchPlan(kv.rows(batch.slot_mapping), *self.rotary.at(batch.positions))

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        return rms_norm(rows if delta is None else rows.add_(delta), weight, self.eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_multiply(gate_up)

    def rotate_and_write(
        self, projected: torch.Tensor, norms: HeadNorms | None, kv: KVCache, index: int, plan: TorchPlan
    ) -> torch.Tensor:
        num_rotated = projected.shape[1] - kv.num_kv_heads
        num_heads = num_rotated - kv.num_kv_heads
        heads = projected[:, :num_rotated]
        if norms is not None:
            query_norm, key_norm = norms
            query = rms_norm(heads[:, :num_heads], query_norm, self.eps)
            heads = torch.cat((query, rms_norm(heads[:, num_heads:], key_norm, self.eps)), dim=1)
        heads = rotate(heads, plan.cos, plan.sin)
        projected[:, num_heads:num_rotated] = heads[:, num_heads:]
        kv.write(index, projected[:, num_heads:], plan.rows)
        return heads[:, :num_heads]


def make_operations(attention: str, rotary: RotaryTable, eps: float) -> Operations:
    """Our kernels where attention runs in Triton, torch's operations elsewhere."""
    if attention == "triton":
        from pagedserve.engine.model.kernel_operations import KernelOperations  # needs Triton

        return KernelOperations(rotary, eps)
    return TorchOperations(rotary, eps)
