"""top_k and top_p on fixed-point weights, exactly and without sorting the vocabulary.

Both keep the leading tokens in one order: weight down, then id up. So what stays is named by a floor and a quota:
every token above the floor, and the first `quota` of those at it. Sums and counts are integers throughout.
"""

import torch
from torch import Tensor

from pagedserve.engine.sampling.fixed_point import SCALE_BITS

# A weight has 24 significant bits, so float32 holds it exactly, and the bits of a positive float32 sort like the
# number. They are split in two digits: the exponent with the first 9 bits of the fraction, and the other 14.
FINE_BITS = 14
NUM_LEADERS = 64
NUM_FINE = 1 << FINE_BITS
_BITS_OF_ONE = 127 << 23
_FIRST_COARSE = _BITS_OF_ONE >> FINE_BITS
NUM_COARSE = (SCALE_BITS << (23 - FINE_BITS)) + 1


def keep_top_k(weights: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int) -> Tensor:
    """The weights with zero outside each row's top k, then outside the nucleus of what is left.

    weights: int64 [R, V], some positive in each row. top_k: int64 [R], from 1 to largest_k, at most V; exactly k
    stay. top_p: float64 [R], as in `keep_nucleus`, relative to the mass of the top k.
    """
    leaders = weights.topk(largest_k, dim=-1).values
    ranks = torch.arange(largest_k, device=weights.device)
    leaders.masked_fill_(ranks >= top_k.unsqueeze(-1), 0)
    return _cut_among(leaders, weights, _share(top_p, leaders.sum(dim=-1)))


def keep_nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """The weights with zero outside each row's nucleus (Holtzman et al. 2020).

    weights: int64 [R, V], some positive in each row. top_p: float64 [R], above 0; 1 keeps all. The nucleus is the
    shortest run of leading tokens that holds top_p of the row's mass: the token that crosses the line is kept, as
    in vLLM.
    """
    limit = _share(top_p, weights.sum(dim=-1))
    if weights.device.type != "cpu":
        return _cut_by_digits(weights, limit)
    # Most nuclei of a language model are small. Elsewhere, asking which would wait for the device.
    leaders = weights.topk(min(NUM_LEADERS, weights.shape[-1]), dim=-1).values
    is_small = leaders.sum(dim=-1) >= limit
    if is_small.all():
        return _cut_among(leaders, weights, limit)
    kept = torch.empty_like(weights)
    kept[is_small] = _cut_among(leaders[is_small], weights[is_small], limit[is_small])
    kept[~is_small] = _cut_by_digits(weights[~is_small], limit[~is_small])
    return kept


def _share(top_p: Tensor, mass: Tensor) -> Tensor:
    """ceil(top_p * mass), int64 [R]: how much a nucleus must hold."""
    # In doubles the product can be off in the last place; 1 must keep everything all the same.
    return torch.where(top_p < 1, (top_p * mass.double()).ceil().to(torch.int64), mass)


def _cut_among(leaders: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """Keep the shortest run that holds the limit [R], given its leaders [R, K] in falling order."""
    kept = (leaders.cumsum(dim=-1) - leaders) < limit.unsqueeze(-1)
    floor = leaders.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    return _cut(weights, floor, (kept & (leaders == floor)).sum(dim=-1, keepdim=True))


def _cut_by_digits(weights: Tensor, limit: Tensor) -> Tensor:
    """Keep the shortest run that holds the limit [R], found by radix selection: two histograms, no sort."""
    bits = weights.float().view(torch.int32).to(torch.int64)
    coarse = ((bits >> FINE_BITS) - _FIRST_COARSE).clamp_(min=0)  # weight zero joins one: it has no mass
    coarse_digit, limit = _digit_that_reaches(limit, coarse, weights, NUM_COARSE)
    contested = weights * (coarse == coarse_digit)
    fine_digit, limit = _digit_that_reaches(limit, bits & (NUM_FINE - 1), contested, NUM_FINE)
    floor_bits = ((coarse_digit + _FIRST_COARSE) << FINE_BITS) | fine_digit
    floor = floor_bits.to(torch.int32).view(torch.float32).to(torch.int64)
    quota = (limit.unsqueeze(-1) + floor - 1) // floor
    return _cut(weights, floor, quota)


def _digit_that_reaches(limit: Tensor, digits: Tensor, weights: Tensor, num_digits: int) -> tuple[Tensor, Tensor]:
    """From the largest digit down, the one whose mass reaches the limit [R, 1], and what it must give [R]."""
    mass = torch.zeros(len(digits), num_digits, dtype=torch.int64, device=digits.device)
    mass = mass.scatter_add_(1, digits, weights).flip(-1)
    running = mass.cumsum(dim=-1)
    index = torch.searchsorted(running, limit.unsqueeze(-1))
    above = running.gather(-1, index) - mass.gather(-1, index)
    return num_digits - 1 - index, limit - above.squeeze(-1)


def _cut(weights: Tensor, floor: Tensor, quota: Tensor) -> Tensor:
    """Zero below the floor [R, 1], and for those at the floor after the first `quota` [R, 1] by id."""
    at_floor = weights == floor
    within = at_floor.cumsum(dim=-1) <= quota
    return weights * ((weights > floor) | (at_floor & within))
