"""top_k and top_p on fixed-point weights, exactly and without sorting the vocabulary.

Both keep the leading tokens in one order: weight down, then id up. So what stays is named by a floor and a
quota: every token above the floor, and the first `quota` of those at it. All sums and counts are integers.
"""

import torch
from torch import Tensor

from pagedserve.engine.sampling.fixed_point import SCALE_BITS

# A weight has 24 significant bits, so float32 holds it exactly, and the bits of a positive float32 sort like
# the number. They are split in two digits: the exponent with 9 bits of the fraction, and the other 14 bits.
FINE_BITS = 14
NUM_FINE = 1 << FINE_BITS
FIRST_COARSE = (127 << 23) >> FINE_BITS  # the digit of weight one
NUM_COARSE = (SCALE_BITS << (23 - FINE_BITS)) + 1


def keep_top_k(weights: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int) -> Tensor:
    """The weights with zero outside each row's top k, then outside the nucleus of what is left.

    weights: int64 [R, V], some positive in each row. top_k: int64 [R], from 1 to largest_k, at most V;
    exactly k stay. top_p: float64 [R], as in `keep_nucleus`, relative to the mass of the top k.
    """
    leaders = first_k(weights.topk(largest_k, dim=-1).values, top_k)
    return cut(weights, *floor_and_quota(leaders, share(top_p, leaders.sum(dim=-1))))


def keep_nucleus(weights: Tensor, limit: Tensor) -> Tensor:
    """The weights with zero outside each row's nucleus (Holtzman et al. 2020).

    weights: int64 [R, V]. limit: int64 [R], from 1 to the row's mass, see `share`. The nucleus is the
    shortest run of leading tokens that holds the limit: the token that crosses the line is kept, as in vLLM.
    Its end is found by radix selection on the weights: two histograms instead of a sort.
    """
    bits = weights.float().view(torch.int32).to(torch.int64)
    coarse = ((bits >> FINE_BITS) - FIRST_COARSE).clamp_(min=0)  # weight zero joins one: it has no mass
    coarse_digit, limit = _digit_that_reaches(limit, coarse, weights, NUM_COARSE)
    contested = weights * (coarse == coarse_digit)
    fine_digit, limit = _digit_that_reaches(limit, bits & (NUM_FINE - 1), contested, NUM_FINE)
    floor_bits = ((coarse_digit + FIRST_COARSE) << FINE_BITS) | fine_digit
    floor = floor_bits.to(torch.int32).view(torch.float32).to(torch.int64)
    return cut(weights, floor, (limit.unsqueeze(-1) + floor - 1) // floor)


def share(top_p: Tensor, mass: Tensor) -> Tensor:
    """ceil(top_p * mass), int64 [R]: how much a nucleus must hold."""
    # In doubles the product can be off in the last place; 1 must keep everything all the same.
    return torch.where(top_p < 1, (top_p * mass.double()).ceil().to(torch.int64), mass)


def first_k(leaders: Tensor, top_k: Tensor) -> Tensor:
    """Leaders [R, K] in falling order, with zero from the row's top_k [R] on."""
    ranks = torch.arange(leaders.shape[-1], device=leaders.device)
    return leaders * (ranks < top_k.unsqueeze(-1))


def floor_and_quota(leaders: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Floor and quota [R, 1] of the shortest run of falling leaders [R, K] that holds the limit [R]."""
    kept = (leaders.cumsum(dim=-1) - leaders) < limit.unsqueeze(-1)
    floor = leaders.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    return floor, (kept & (leaders == floor)).sum(dim=-1, keepdim=True)


def cut(weights: Tensor, floor: Tensor, quota: Tensor) -> Tensor:
    """Zero below the floor [R, 1], and for those at the floor after the first `quota` [R, 1] by id."""
    at_floor = weights == floor
    within = at_floor.cumsum(dim=-1) <= quota
    return weights * ((weights > floor) | (at_floor & within))


def _digit_that_reaches(
    limit: Tensor, digits: Tensor, weights: Tensor, num_digits: int
) -> tuple[Tensor, Tensor]:
    """From the largest digit down, the one whose mass reaches the limit [R, 1], and what it must give [R]."""
    mass = torch.zeros(len(digits), num_digits, dtype=torch.int64, device=digits.device)
    mass = mass.scatter_add_(1, digits, weights).flip(-1)
    running = mass.cumsum(dim=-1)
    index = torch.searchsorted(running, limit.unsqueeze(-1))
    above = running.gather(-1, index) - mass.gather(-1, index)
    return num_digits - 1 - index, limit - above.squeeze(-1)
