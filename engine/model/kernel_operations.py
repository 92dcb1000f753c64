"""The operations between a layer's matrix products in our Triton kernels: fewer launches and passes over memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.operations import HeadNorms
from pagedserve.engine.model.rope import RotaryTable
from pagedserve.kernels import rope_kv
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.kernels.rms_norm import add_rms_norm, rms_norm
from pagedserve.kernels.silu_multiply import silu_multiply


@dataclass(frozen=True, slots=True)
class KernelOperations:
    """See `Operations`. On CUDA devices, or any under Triton's interpreter."""

    rotary: RotaryTable
    eps: float

    def prepare(self, batch: ForwardBatch, kv: KVCache) -> ForwardBatch:
        return batch

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        if delta is None:
            return rms_norm(rows, weight, self.eps)
        return add_rms_norm(rows, delta, weight, self.eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_multiply(gate_up)

    def rotate_and_write(
        self, projected: torch.Tensor, norms: HeadNorms | None, kv: KVCache, index: int, plan: ForwardBatch
    ) -> torch.Tensor:
        return rope_kv.rotate_and_write(
            projected,
            plan.positions,
            (self.rotary.cos, self.rotary.sin),
            plan.slot_mapping,
            kv.layer(index),
            norms,
            self.eps,
            kv.scales[index],
        )
