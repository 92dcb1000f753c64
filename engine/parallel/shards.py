"""How a model is cut for tensor parallelism, as plain arithmetic on names and shapes.

Megatron-LM's cut (Shoeybi et al. 2019, arXiv 1909.08053): of N ranks, each has every Nth part of the heads and of
the inner size of the MLP, so that a layer needs two sums over all ranks, one behind each of the projections that
come back to the hidden size. Rows of the vocabulary are cut as well; ids that another rank has give zeros.

    rows are cut      q_proj, k_proj, v_proj, gate_proj, up_proj, embed_tokens, lm_head, and their biases
    columns are cut   o_proj, down_proj; their biases are added by rank 0 alone
    kept whole        norms
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.weights import TensorSource, expected_shapes

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


class CannotShard(ValueError):
    """The model does not divide into so many parts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``size`` ranks, from 0."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def part(self, whole: int) -> slice:
        """This rank's part of ``whole`` things, all parts equal but the last."""
        each = -(-whole // self.size)
        return slice(min(whole, self.rank * each), min(whole, (self.rank + 1) * each))


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The configuration of one rank's part: its heads, its inner size, its rows of the vocabulary (padded).

    Raises `CannotShard` naming what does not divide.
    """
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, name) % shard.size:
            raise CannotShard(
                f"tensor_parallel_size is {shard.size}; the model's {name}, {getattr(config, name)}, does not divide "
                "by it: choose a divisor"
            )
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // shard.size,
        intermediate_size=config.intermediate_size // shard.size,
        vocab_size=-(-config.vocab_size // shard.size),
    )


class ShardedSource:
    """A `TensorSource` that gives one rank's part of another's tensors, in the shapes of `shard_config`."""

    def __init__(self, source: TensorSource, config: ModelConfig, shard: Shard) -> None:
        """``config``: of the whole model."""
        self._source, self._shard = source, shard
        self._shapes = expected_shapes(shard_config(config, shard))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `TensorSource.shapes`."""
        found = self._source.shapes()
        return {name: shape for name, shape in self._shapes.items() if name in found}

    def get(self, name: str) -> torch.Tensor:
        """See `TensorSource.get`; a copy, so that the whole tensor can go."""
        return self._part(name, self._source.get(name)).clone()

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        shard = self._shard
        module, kind = name.split(".")[-2:]
        if module in _ROWS:
            return whole[shard.part(len(whole))]
        if module in _COLUMNS and kind == "weight":
            return whole[:, shard.part(whole.shape[1])]
        if module in _COLUMNS:
            return whole if shard.rank == 0 else torch.zeros_like(whole)
        if module in _VOCABULARY:
            rows = whole[shard.part(len(whole))]
            missing = self._shapes[name][0] - len(rows)
            return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
        return whole
