"""Tokens for the rows that use noise, by what their filters need.

On a CPU the few largest logits are tried first: most filters keep no other token, and that can be checked.
Rows that fail the check take the same filters over the whole vocabulary, as all rows do on a device, where
checking would mean waiting. Which way a row goes follows from the row alone, so neighbours do not matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedserve.engine.sampling.filters import (
    cut,
    first_k,
    floor_and_quota,
    keep_nucleus,
    keep_top_k,
    share,
)
from pagedserve.engine.sampling.fixed_point import draw, fixed_point_weights

NUM_NEAR = 128


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

    def take(self, rows: Tensor | slice) -> "RandomRows":
        """Some of the rows, by mask or slice."""
        return RandomRows(
            logits=self.logits[rows],
            peaks=self.peaks[rows],
            temperature=self.temperature[rows],
            min_weight=None if self.min_weight is None else self.min_weight[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            words=self.words[rows],
        )

    def weights(self, logits: Tensor) -> Tensor:
        """Fixed-point weights of the rows' logits [R, N], all or some of them, by temperature and min_p."""
        weights = fixed_point_weights(logits, self.peaks, self.temperature)
        if self.min_weight is not None:
            weights.mul_(weights >= self.min_weight.unsqueeze(-1))
        return weights


def draw_plain(rows: RandomRows) -> Tensor:
    """Tokens [R] with temperature and min_p only."""
    return draw(rows.weights(rows.logits), rows.words)


def draw_top_k(rows: RandomRows, largest_k: int) -> Tensor:
    """Tokens [R] of rows that have a top_k, at most largest_k."""
    if not _has_near(rows):
        return _draw_top_k_of_all(rows, largest_k)
    ids = _near_ids(rows)
    near = rows.weights(rows.logits.gather(-1, ids))
    ranked, edge = _rank(near)
    leaders = first_k(ranked, rows.top_k)
    kept = cut(near, *floor_and_quota(leaders, share(rows.top_p, leaders.sum(dim=-1))))
    tokens = _pick(ids, kept, rows)
    last_kept = ranked.gather(-1, rows.top_k.clamp(max=NUM_NEAR).unsqueeze(-1) - 1).squeeze(-1)
    far = (last_kept <= edge) | (rows.top_k >= NUM_NEAR)
    if far.any():
        tokens[far] = _draw_top_k_of_all(rows.take(far), largest_k)
    return tokens


def draw_nucleus(rows: RandomRows) -> Tensor:
    """Tokens [R] of rows that have a top_p and no top_k."""
    weights = rows.weights(rows.logits)
    limit = share(rows.top_p, weights.sum(dim=-1))
    if not _has_near(rows):
        return draw(keep_nucleus(weights, limit), rows.words)
    ids = _near_ids(rows)
    near = weights.gather(-1, ids)
    ranked, edge = _rank(near)
    floor, quota = floor_and_quota(ranked, limit)
    tokens = _pick(ids, cut(near, floor, quota), rows)
    far = (ranked.sum(dim=-1) < limit) | (floor.squeeze(-1) <= edge)
    if far.any():
        tokens[far] = draw(keep_nucleus(weights[far], limit[far]), rows.words[far])
    return tokens


def _draw_top_k_of_all(rows: RandomRows, largest_k: int) -> Tensor:
    weights = rows.weights(rows.logits)
    return draw(keep_top_k(weights, rows.top_k, rows.top_p, largest_k), rows.words)


def _has_near(rows: RandomRows) -> bool:
    return rows.logits.device.type == "cpu" and rows.logits.shape[-1] > NUM_NEAR


def _near_ids(rows: RandomRows) -> Tensor:
    """The tokens with the largest logits, in id order, as a draw needs them [R, NUM_NEAR]."""
    return rows.logits.topk(NUM_NEAR, dim=-1).indices.sort(dim=-1).values


def _rank(near: Tensor) -> tuple[Tensor, Tensor]:
    """The weights in falling order, and the edge [R]: no token outside weighs more.

    Logits, not weights, said what is near; exp can round a smaller logit up and a larger one down, hence the
    margin. Where the last weighs nothing, nothing lies outside.
    """
    ranked = near.sort(dim=-1, descending=True).values
    last = ranked[:, -1]
    return ranked, torch.where(last > 0, last + (last >> 16) + 1, -1)


def _pick(ids: Tensor, kept: Tensor, rows: RandomRows) -> Tensor:
    return ids.gather(-1, draw(kept, rows.words).unsqueeze(-1)).squeeze(-1)
