"""Tokens of a whole batch by our Triton kernels; what `sampler.choose_in_torch` does, to the same definitions."""

from torch import Tensor

from pagedserve.engine.sampling.rows import SamplingBatch
from pagedserve.kernels.greedy import greedy_tokens
from pagedserve.kernels.sampling import CHUNK, choose, weigh


def choose_by_kernels(logits: Tensor, batch: SamplingBatch, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [R] and peaks float32 [R] of ``logits`` float32 [R, V], without waiting for the device.

    Rows that use noise become weights in place. ``chunk``: columns that a program takes at once.

    Weights differ from torch's in their last place, as `exp` does between libraries; given equal weights the
    tokens are equal.
    """
    layout = batch.layout
    tokens, peaks = greedy_tokens(logits)
    if len(layout.random_rows):
        rows = layout.random_rows
        sums = weigh(logits, peaks, rows, layout.temperature, layout.min_weight, chunk)
        choose(tokens, logits, sums, rows, layout.top_k, layout.top_p, batch.words, chunk)
    return tokens, peaks
