"""Tokens for the rows that use noise, by what their filters need.

On a CPU what lies far below a filter's floor is dropped before the exact work, so that little of it is as
long as the vocabulary. Elsewhere that would mean waiting for the device. Both ways give the same token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedserve.engine.sampling.filters import boundary_bin, cut, floor_and_quota, narrow, share
from pagedserve.engine.sampling.fixed_point import draw, fixed_point_weights

NARROWING_DEVICES = {"cpu"}
# Beyond this share of the vocabulary, moving the tokens together costs more than it saves.
MAX_NARROW = 1 / 16


@dataclass(frozen=True, slots=True)
class RandomRows:
    """R rows of one kind and what they need, see `rows.SamplingLayout`. logits: float32 [R, V]; the rest [R].

    Every peak is finite. min_weight is None where no row has a min_p.
    """

    logits: Tensor
    peaks: Tensor
    temperature: Tensor
    min_weight: Tensor | None
    top_k: Tensor
    top_p: Tensor
    words: Tensor

    def weights(self) -> Tensor:
        """The distribution after temperature and min_p, int64 [R, V]."""
        weights = fixed_point_weights(self.logits, self.peaks, self.temperature)
        if self.min_weight is not None:
            weights.mul_(weights >= self.min_weight.unsqueeze(-1))
        return weights


def draw_plain(rows: RandomRows) -> Tensor:
    """Tokens [R] with temperature and min_p only."""
    return draw(rows.weights(), rows.words)


def draw_top_k(rows: RandomRows, largest_k: int) -> Tensor:
    """Tokens [R] of rows that have a top_k, at most largest_k, and perhaps a top_p of what top_k leaves.

    Exactly k tokens stay, of equals the lower ids, so that k = 1 is the greedy choice.
    """
    weights = rows.weights()
    leaders = weights.topk(largest_k, dim=-1).values
    leaders.mul_(torch.arange(largest_k, device=weights.device) < rows.top_k.unsqueeze(-1))
    limit = share(rows.top_p, leaders.sum(dim=-1))
    return _draw_leading(weights, *floor_and_quota(leaders, limit), rows.words)


def draw_nucleus(rows: RandomRows) -> Tensor:
    """Tokens [R] of rows that have a top_p (the nucleus of Holtzman et al. 2020) and no top_k."""
    weights = rows.weights()
    limit = share(rows.top_p, weights.sum(dim=-1))
    leaders = weights
    if weights.device.type in NARROWING_DEVICES:
        low, high, limit = boundary_bin(weights, limit)
        _, leaders = narrow(weights, (weights >= low) & (weights < high))
    # float32 holds a weight exactly and sorts faster.
    leaders = leaders.float().sort(dim=-1, descending=True).values.to(torch.int64)
    return _draw_leading(weights, *floor_and_quota(leaders, limit), rows.words)


def _draw_leading(weights: Tensor, floor: Tensor, quota: Tensor, words: Tensor) -> Tensor:
    """Tokens [R] from what floor and quota [R, 1] keep."""
    leading = weights >= floor
    if weights.device.type not in NARROWING_DEVICES or leading.sum() > MAX_NARROW * leading.numel():
        return draw(cut(weights, floor, quota), words)
    ids, near = narrow(weights, leading)
    index = draw(cut(near, floor, quota), words)
    return ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
