"""top_k and top_p on fixed-point weights, exactly.

Both keep the leading tokens in one order: weight down, then id up. So what stays is named by a floor and a
quota: every token above the floor, and the first `quota` of those at it. All sums and counts are integers.
"""

import torch
from torch import Tensor

from pagedserve.engine.sampling.fixed_point import SCALE_BITS

# A weight has 24 significant bits, so float32 holds it exactly, and the bits of a positive float32 sort like
# the number. Counted from those of weight one, the upper ones (the exponent and five bits more) name one of
# these bins.
BITS_OF_ONE = 127 << 23
BIN_SHIFT = 18
NUM_BINS = 2048
assert SCALE_BITS << 23 >> BIN_SHIFT < NUM_BINS


def share(top_p: Tensor, mass: Tensor) -> Tensor:
    """ceil(top_p * mass), int64 [R]: how much a nucleus must hold."""
    # In doubles the product can be off in the last place; 1 must keep everything all the same.
    return torch.where(top_p < 1, (top_p * mass.double()).ceil().to(torch.int64), mass)


def floor_and_quota(leaders: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Floor and quota [R, 1] of the shortest run of falling leaders [R, K] that holds the limit [R].

    The token that crosses the line is kept, as in vLLM's top_p.
    """
    kept = (leaders.cumsum(dim=-1) - leaders) < limit.unsqueeze(-1)
    floor = leaders.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    return floor, (kept & (leaders == floor)).sum(dim=-1, keepdim=True)


def cut(weights: Tensor, floor: Tensor, quota: Tensor) -> Tensor:
    """Zero below the floor [R, 1], and for those at the floor after the first `quota` [R, 1] by id."""
    at_floor = weights == floor
    within = at_floor.cumsum(dim=-1) <= quota
    return weights * ((weights > floor) | (at_floor & within))


def boundary_bin(weights: Tensor, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens a nucleus ends among, from one histogram of the weights [R, V].

    They weigh low <= weight < high, both [R, 1]; those above are kept and hold all of the limit [R] but the
    rest [R].
    """
    bits = weights.float().view(torch.int32).to(torch.int64) - BITS_OF_ONE
    bins = (bits >> BIN_SHIFT) & (NUM_BINS - 1)  # weight zero falls anywhere and adds nothing
    mass = torch.zeros(len(weights), NUM_BINS, dtype=torch.int64, device=weights.device)
    mass = mass.scatter_add_(1, bins, weights).flip(-1)
    running = mass.cumsum(dim=-1)
    index = torch.searchsorted(running, limit.unsqueeze(-1))
    rest = limit - (running.gather(-1, index) - mass.gather(-1, index)).squeeze(-1)
    lowest_bits = ((NUM_BINS - 1 - index) << BIN_SHIFT) + BITS_OF_ONE
    low, high = (
        bits.to(torch.int32).view(torch.float32).to(torch.int64)
        for bits in (lowest_bits, lowest_bits + (1 << BIN_SHIFT))
    )
    return low, high, rest


def narrow(weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights [R, W] of the chosen tokens (a mask of weights [R, V]), in id order; waits for a device.

    W is the longest row's number of them; shorter rows end in tokens of weight zero.
    """
    rows, ids = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(weights))
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(weights), int(counts.max()))
    near_ids = torch.zeros(shape, dtype=torch.int64, device=rows.device)
    near = torch.zeros_like(near_ids)
    near_ids[rows, columns] = ids
    near[rows, columns] = weights[rows, ids]
    return near_ids, near
