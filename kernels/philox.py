"""The sampling noise on the device: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), one word a token.

    word = philox4x32-10(counter = (position low, position high, sample index, stream 0), key = seed)[0]

The same integers as `pagedserve.engine.sampling.philox`, which is its twin, in one launch; for positions that are
on the device already. On the host's side the twin takes a few microseconds, and is what the sampler uses.
"""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


# Sizes that change from step to step: specialised, each kind of number would be compiled anew while serving.
@triton.jit(do_not_specialize=["num_words"])
def noise_words_kernel(
    words_ptr,
    seeds_ptr,
    positions_ptr,
    sample_indices_ptr,
    num_words,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_words / BLOCK); all pointers to int64."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_words
    seed = tl.load(seeds_ptr + index, mask=inside, other=0)
    position = tl.load(positions_ptr + index, mask=inside, other=0)
    c0 = position.to(tl.uint32)
    c1 = (position >> 32).to(tl.uint32)
    c2 = tl.load(sample_indices_ptr + index, mask=inside, other=0).to(tl.uint32)
    c3 = tl.zeros([BLOCK], tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    a = tl.full([BLOCK], 0xD2511F53, tl.uint32)
    b = tl.full([BLOCK], 0xCD9E8D57, tl.uint32)
    weyl_a = tl.full([BLOCK], 0x9E3779B9, tl.uint32)
    weyl_b = tl.full([BLOCK], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high_a = tl.umulhi(a, c0)
        high_b = tl.umulhi(b, c2)
        low_a = tl.mul(a, c0, sanitize_overflow=False)
        low_b = tl.mul(b, c2, sanitize_overflow=False)
        c0 = high_b ^ c1 ^ k0
        c1 = low_b
        c2 = high_a ^ c3 ^ k1
        c3 = low_a
        k0 = tl.add(k0, weyl_a, sanitize_overflow=False)
        k1 = tl.add(k1, weyl_b, sanitize_overflow=False)
    tl.store(words_ptr + index, c0.to(tl.int64), mask=inside)


def noise_words(seeds: torch.Tensor, positions: torch.Tensor, sample_indices: torch.Tensor) -> torch.Tensor:
    """Words 0 .. 2**32 - 1, int64 [N], for int64 [N] each; see `pagedserve.engine.sampling.philox.noise_words`."""
    for each in (seeds, positions, sample_indices):
        assert each.dtype == torch.int64, f"{each.dtype} for a seed, a position or an index"
        assert each.shape == seeds.shape, f"{tuple(each.shape)} beside {tuple(seeds.shape)}"
        assert each.is_contiguous(), f"strides {each.stride()}"
    words = torch.empty_like(seeds)
    noise_words_kernel[(triton.cdiv(len(seeds), BLOCK),)](
        words, seeds, positions, sample_indices, len(seeds), ROUNDS=10, BLOCK=BLOCK
    )
    return words
