"""The pieces of a transformer layer other than attention, on flattened tokens.

On a CPU, weights are packed once into oneDNN's own order. Measured on two AVX512_BF16 cores with the shapes
of a 135M model at 32 rows, that takes 0.8 of the time of ``linear`` in bfloat16 and 0.65 in float32 (0.4 for
the head), and unlike MKL's float32 product it gives a row the same bits among any number of rows above one.
"""

import torch
from torch.nn import functional

_MIN_ROWS_PACKED = 2
_MIN_ROWS_UNPACKED = 16
"""Fewer rows take another summation order in the CPU libraries, so they are padded up to this many."""


class Linear:
    """y = x W^T + b for ``weight`` [out, in]; on a CPU the weight is kept packed and ``weight`` is not."""

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [T, out] for ``rows`` [T, in], same dtype; on a CPU a row's bits depend on it alone."""
        count = rows.shape[0]
        if self._packed:
            if count < _MIN_ROWS_PACKED:
                rows = functional.pad(rows, (0, 0, 0, _MIN_ROWS_PACKED - count))
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")[:count]
        if rows.device.type == "cpu" and count < _MIN_ROWS_UNPACKED:
            rows = functional.pad(rows, (0, 0, 0, _MIN_ROWS_UNPACKED - count))
        return functional.linear(rows, self._weight, self._bias)[:count]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch build can pack a CPU weight of ``dtype`` and multiply with it.

    The two operators are those that torch's own compiler emits; a build without them uses plain ``linear``.
    """
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last axis, in float32 inside, rounded once."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, n], for ``gate_up`` [T, 2n] (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
