"""Probabilities as integers, so that every sum over the vocabulary is exact.

A float sum depends on the order of its terms, and libraries choose that order by batch size, alignment and
thread count. Integers have no such freedom: the same row gives the same token alone, in any batch and on any
number of threads. Zero weight means never drawn, also at the last grid point of the uniform.
"""

import torch
from torch import Tensor

# The largest weight of a row is 2**40: finer than the 2**-32 grid of the uniform, and 2**22 such weights
# still sum to less than 2**63.
SCALE_BITS = 40
MAX_VOCAB = 2**22


def fixed_point_weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """floor(2**40 * exp((logits - peak) / temperature)), int64 [R, V]; softmax up to the row's sum.

    logits: float32 [R, V], -inf for a masked token. peak: [R], each row's largest logit, finite.
    temperature: float32 [R], at least 1e-5. Rows without a finite peak give garbage, in their own row only.
    """
    assert logits.shape[-1] <= MAX_VOCAB, f"a vocabulary of {logits.shape[-1]} can overflow 63 bits"
    # Subtracting first keeps a tiny temperature from overflowing: the peak stays 0, the rest goes to -inf.
    scaled = (logits - peak.unsqueeze(-1)).div_(temperature.unsqueeze(-1))
    return scaled.exp_().mul_(float(2**SCALE_BITS)).to(torch.int64)


def scaled_target(totals: Tensor, words: Tensor) -> Tensor:
    """floor(totals * words / 2**32), exactly; int64 [R], totals below 2**62 and words below 2**32."""
    half = (1 << 31) - 1
    return ((totals >> 31) * words + (((totals & half) * words) >> 31)) >> 1


def draw(weights: Tensor, words: Tensor) -> Tensor:
    """The inverse cumulative distribution in token-id order: int64 [R].

    weights: int64 [R, V], not negative, some positive in each row. The token is the first whose running sum
    exceeds word / 2**32 of the row's total. That target is below the total, so weight zero is never drawn.
    """
    running = weights.cumsum(dim=-1)
    target = scaled_target(running[:, -1], words)
    return torch.searchsorted(running, target.unsqueeze(-1), right=True).squeeze(-1)
