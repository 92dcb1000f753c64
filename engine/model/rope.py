"""Rotary position embedding: frequencies, and the table of cosines and sines.

Sources: RoFormer (Su et al. 2021) for the rotation, position interpolation (Chen et al. 2023) for ``linear``,
Llama 3.1's reference code for ``llama3``. Halves are rotated against each other, as in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pagedserve.engine.model.errors import UnsupportedModel

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How base frequencies are stretched.

    ``linear`` divides all by ``factor``; ``llama3`` divides the slow ones and blends between;
    ``factors`` (GGUF's form of llama3) divides each by its own number, head_dim / 2 of them.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()


def parse_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta``, ``rope_scaling``.

    Raises ``UnsupportedModel`` naming a rope type other than default, linear and llama3.
    """
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(
            f"unsupported rope parameters per layer type ({', '.join(nested)}): one set for all layers is"
        )
    theta = float(parameters.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModel(
            f"unsupported rope type {kind!r}. Supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(
            f"unsupported partial_rotary_factor {parameters['partial_rotary_factor']}: only 1.0 is"
        )
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=float(parameters["factor"]))
        original = parameters.get("original_max_position_embeddings") or values["max_position_embeddings"]
        return theta, RopeScaling(
            kind="llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=int(original),
        )
    except KeyError as error:
        raise UnsupportedModel(
            f"rope type {kind!r} needs {error.args[0]!r}, which the model config lacks"
        ) from None


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return [head_dim / 2] float32 angles per position, by the operations of transformers (same bits)."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        if len(scaling.factors) != head_dim // 2:
            raise UnsupportedModel(f"{len(scaling.factors)} rope factors for {head_dim // 2} frequencies")
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    original = scaling.original_max_position_embeddings
    low_wavelength = original / scaling.low_freq_factor
    high_wavelength = original / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    slow = torch.where(wavelength > low_wavelength, frequencies / scaling.factor, frequencies)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (original / wavelength - scaling.low_freq_factor) / span
    blended = (1 - smooth) * slow / scaling.factor + smooth * slow
    between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(between, blended, slow)


class RotaryTable:
    """Cosines and sines of every position up to a limit, looked up once a step for all layers.

    A table, not a recomputation, so that one position has the same bits in every batch. float32 whatever
    the model's dtype: the rotation is computed in float32 and rounded once.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, frequencies: torch.Tensor, num_positions: int, device: torch.device) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [T, 1, head_dim / 2] for ``positions`` [T]."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(
            0, positions
        ).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads`` [T, heads, head_dim] by ``cos`` and ``sin`` [T, 1, head_dim / 2] into a new tensor."""
    source = heads.float()
    first, second = source.chunk(2, dim=-1)
    rotated = torch.empty(source.shape, dtype=torch.float32, device=heads.device)
    first_out, second_out = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=first_out)
    first_out.addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=second_out)
    second_out.addcmul_(first, sin)
    return rotated.to(heads.dtype)
