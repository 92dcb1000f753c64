"""The largest logits in an exact order (value down, id up), without sorting the vocabulary.

`torch.topk` leaves open which of several equal values it returns, and bfloat16 logits are full of equal
values. So what ties with the last value fetched is not relied upon here; where it matters, more is fetched.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH_GROWTH = 4


@dataclass(frozen=True, slots=True)
class RankedLogits:
    """Each row's leading tokens. values, ids: [R, W]. num_exact: [R], how many of them are certain."""

    values: Tensor
    ids: Tensor
    num_exact: Tensor
    vocab_size: int


def rank_largest(logits: Tensor, width: int) -> RankedLogits:
    """The `width` largest of each row of [R, V] (or all V) by value, then by lowest id."""
    vocab_size = logits.shape[-1]
    if width >= vocab_size:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return RankedLogits(values, ids, torch.full_like(ids[:, 0], vocab_size), vocab_size)
    values, ids = logits.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    # Whatever equals the last value may have twins outside: only what is strictly larger is complete.
    num_exact = (values > values[:, -1:]).sum(dim=-1)
    return RankedLogits(values, ids.gather(-1, order), num_exact, vocab_size)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [R, count] of each row's largest logits, in exact order; count is at most V."""
    values = logits.new_empty(logits.shape[0], count)
    ids = torch.empty(values.shape, dtype=torch.int64, device=logits.device)
    pending = torch.arange(logits.shape[0], device=logits.device)
    width = count + 1
    while pending.numel():
        ranked = rank_largest(logits[pending], width)
        settled = ranked.num_exact >= count
        values[pending[settled]] = ranked.values[settled, :count]
        ids[pending[settled]] = ranked.ids[settled, :count]
        pending = pending[~settled]
        width *= WIDTH_GROWTH
    return values, ids


def keep_top(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Weights with zero for every token outside each row's top k, then outside its nucleus.

    logits: [R, V], giving the order. weights: int64 [R, V], the distribution so far.
    top_k: int64 [R], V for off; exactly k stay, of equals the lower ids: k = 1 is the greedy choice.
    top_p: float64 [R], 1 for off; the nucleus (Holtzman et al. 2020) is the shortest prefix of what top_k
    left that holds top_p of its mass: the token that crosses the line is kept, as in vLLM.
    width: how many tokens to rank at first; rows that need more are ranked again. It never shows in a result.
    """
    kept = torch.zeros_like(weights)
    totals = weights.sum(dim=-1)
    pending = torch.arange(logits.shape[0], device=logits.device)
    while pending.numel():
        ranked = rank_largest(logits[pending], width)
        candidates = weights[pending].gather(-1, ranked.ids)
        survivors, settled = _nucleus(ranked, candidates, totals[pending], top_k[pending], top_p[pending])
        rows = pending[settled].unsqueeze(-1)
        kept[rows, ranked.ids[settled]] = survivors[settled]
        pending = pending[~settled]
        width *= WIDTH_GROWTH
    return kept


def _nucleus(
    ranked: RankedLogits, candidates: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The candidates' weights after both filters [R, W], and which rows are settled [R]."""
    # Beyond a last candidate of weight zero lie only zeros; and top_k keeps nothing beyond its k-th.
    holds_all = (candidates[:, -1] == 0) | (ranked.num_exact >= top_k)
    columns = torch.arange(candidates.shape[-1], device=candidates.device)
    candidates = candidates.masked_fill(columns >= top_k.unsqueeze(-1), 0)
    running = candidates.cumsum(dim=-1)
    mass = torch.where(holds_all, running[:, -1], totals)
    # In doubles p * mass can be off in the last place; p = 1 must keep everything all the same.
    limit = torch.where(top_p < 1, (top_p * mass.double()).ceil().to(torch.int64), mass)
    inside = (running - candidates) < limit.unsqueeze(-1)
    # Without top_k the row's total is the mass, and a nucleus that ends among the certain ones is settled.
    no_top_k = top_k >= ranked.vocab_size
    settled = holds_all | (no_top_k & (inside.sum(dim=-1) <= ranked.num_exact))
    return candidates.masked_fill(~inside, 0), settled
