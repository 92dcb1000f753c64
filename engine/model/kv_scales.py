"""Scales of an eight-bit KV cache: what keys and values are divided by before they are rounded, two numbers a layer.

From the checkpoint where it has them, under the names that vLLM reads; else measured, if that is asked for
(`calculate_scales`); else 1. They are the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.errors import WeightsError
from pagedserve.kernels.kv_cache import Scales

if TYPE_CHECKING:
    from pagedserve.engine.model.model import Model
    from pagedserve.engine.model.weights import TensorSource

KEY_RANGE, VALUE_RANGE = 200.0, 100.0
"""What the largest key and value measured becomes in e4m3, which ends at 448: vLLM's constants."""
BLOCK_SIZE = 16
_NAMES = (
    ("k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale"),
    ("v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale"),
)
"""Behind a layer's ``self_attn.``: of AutoFP8 and llm-compressor, of vLLM itself, of ModelOpt, and the oldest."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """given: by layer, the checkpoint's scales of keys and of values; measured: the same of `calculate_scales`."""

    given: tuple[tuple[float | None, float | None], ...]
    measured: tuple[Scales, ...] | None = None

    @property
    def num_missing(self) -> int:
        """How many the checkpoint lacks."""
        return sum(scale is None for layer in self.given for scale in layer)

    @property
    def by_layer(self) -> tuple[Scales, ...]:
        """Those in force."""
        others = self.measured or ((1.0, 1.0),) * len(self.given)
        pairs = zip(self.given, others, strict=True)
        return tuple((key or other[0], value or other[1]) for (key, value), other in pairs)

    def __str__(self) -> str:
        missing, total = self.num_missing, 2 * len(self.given)
        given = f"{total - missing} of {total} from the checkpoint" if missing else "from the checkpoint"
        others = "1" if self.measured is None else "measured on made-up prompts"
        if missing == total:
            return others
        return given if not missing else f"{given}, the others {others}"


def no_scales(num_layers: int) -> KVScales:
    """None given: those of a cache that needs none."""
    return KVScales(((None, None),) * num_layers)


def scale_names(num_layers: int) -> frozenset[str]:
    """Every name under which a checkpoint may have one."""
    return frozenset(
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(num_layers)
        for side in _NAMES
        for name in side
    )


def read_scales(source: TensorSource, num_layers: int) -> KVScales:
    """The checkpoint's scales. `WeightsError` names one that is not a single positive number, or said twice."""
    present = source.shapes().keys()
    return KVScales(
        tuple(
            (_read(source, present, layer, _NAMES[0]), _read(source, present, layer, _NAMES[1]))
            for layer in range(num_layers)
        )
    )


def _read(source: TensorSource, present: Container[str], layer: int, names: Sequence[str]) -> float | None:
    found: dict[str, float] = {}
    for name in (f"model.layers.{layer}.self_attn.{name}" for name in names):
        if name not in present:
            continue
        tensor = source.get(name)
        if tensor.numel() != 1:
            raise WeightsError(f"{name} has shape {list(tensor.shape)}; one number a layer is supported")
        found[name] = float(tensor)
        if not (math.isfinite(found[name]) and found[name] > 0):
            raise WeightsError(f"{name} is {found[name]}; a scale is a positive number")
    if len(set(found.values())) > 1:
        raise WeightsError(
            f"a scale is there more than once: {', '.join(f'{k} {v}' for k, v in found.items())}"
        )
    return next(iter(found.values()), None)


def calculate_scales(model: Model, prompts: Sequence[Sequence[int]]) -> None:
    """Compute the prompts and set the model's missing scales by their largest keys and values; every rank calls it.

    The cache of this run has the model's own dtype, so that nothing is rounded while it is measured. ValueError
    names a layer with keys or values that are not finite.
    """
    chunks, num_blocks = [], 0
    for prompt in prompts:
        count = -(-len(prompt) // BLOCK_SIZE)
        chunks.append(SequenceChunk(prompt, 0, range(num_blocks, num_blocks + count)))
        num_blocks += count
    kv = model.make_cache(num_blocks, BLOCK_SIZE, model.dtype)
    model.forward(make_batch(chunks, BLOCK_SIZE, model.device), kv)
    # What no token was written to is zero.
    own = torch.stack([kv.layer(index).abs().amax(dim=(0, 2, 3, 4)) for index in range(kv.num_layers)])
    peaks = model.communicator.all(own.float()).amax(dim=0).tolist()
    for index, layer in enumerate(peaks):
        if not all(map(math.isfinite, layer)):
            raise ValueError(f"layer {index} has keys or values that are not finite: no scale fits them")
    measured = tuple((key / KEY_RANGE or 1.0, value / VALUE_RANGE or 1.0) for key, value in peaks)
    model.kv_scales = replace(model.kv_scales, measured=measured)
