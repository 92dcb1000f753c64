"""From logits to tokens, for a whole batch at once and for each row as if it were alone.

The order is vLLM's: the model's own logprobs are taken; requests' adjustments are made (masks, bias,
penalties: `adjustments`); greedy rows take the largest logit; the others divide by the temperature, filter by
min_p, top_k and top_p, and draw from what is left by inverting its cumulative distribution in token-id order
with one number from Philox.

Nothing sums floats across a row or anything across rows, so a row's token is the same, bit for bit, alone and
in any batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import inf, isnan

import torch
from torch import Tensor

from pagedserve.engine.sampling.draws import RandomRows, draw_nucleus, draw_plain, draw_top_k
from pagedserve.engine.sampling.groups import row_groups
from pagedserve.engine.sampling.logprobs import LogprobBatch, PositionLogprobs, gather_logprobs
from pagedserve.engine.sampling.rows import SamplingBatch, SamplingLayout


class SamplingError(RuntimeError):
    """A row of logits from which no token can be chosen; only its own request is affected."""


class NothingAllowed(SamplingError):
    """What the request itself asks for leaves no token: a grammar that gave up, or masks that leave nothing."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's choices, on the device until `copied`. tokens: int64 [R]. peaks: float32 [R], the largest logits.

    A row whose peak is not finite (NaN, +inf, or -inf where every token was masked) has no valid token:
    `errors` must be asked before the tokens are used. failures: by row, what its grammar says of it.
    """

    layout: SamplingLayout
    tokens: Tensor
    peaks: Tensor
    logprob_batch: LogprobBatch | None
    failures: Mapping[int, str]
    is_adjusted: bool = False
    """Whether requests asked for changes to the logits."""

    def errors(self) -> dict[int, SamplingError]:
        """By request, what went wrong in its row; empty when all is well. Waits for the device."""
        requests = self.layout.requests
        failed = torch.nonzero(~torch.isfinite(self.peaks)).flatten().tolist()
        return {
            requests[row]: _explain(
                requests[row], self.peaks[row].item(), self.failures.get(row), self.is_adjusted
            )
            for row in failed
        }

    def logprobs(self) -> dict[int, PositionLogprobs]:
        """By request, for those that asked. Waits for the device."""
        if self.logprob_batch is None:
            return {}
        positions = self.logprob_batch.positions(self.layout.num_top_logprobs)
        return dict(zip(self.layout.logprob_requests, positions, strict=True))

    def copied(self, take: Callable[[Tensor], Tensor]) -> "SampledTokens":
        """The same, with what ``take`` makes of each tensor that `errors` and `logprobs` read."""
        logprob_batch = None if self.logprob_batch is None else self.logprob_batch.copied(take)
        return replace(self, tokens=take(self.tokens), peaks=take(self.peaks), logprob_batch=logprob_batch)


def sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Choose one token per row.

    logits: float32 [R, C], R the number of requests the batch was selected for, C at least the vocabulary
    size: padded columns beyond it are never chosen. Consumed: masked ids are overwritten in place.
    """
    layout = batch.layout
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}; the sampler works on float32"
    assert logits.shape[0] == len(layout.requests), (
        f"{logits.shape[0]} rows for {len(layout.requests)} requests"
    )
    assert logits.shape[1] >= batch.vocab_size, f"{logits.shape[1]} logits for {batch.vocab_size} tokens"
    logits = logits[:, : batch.vocab_size]
    wants_logprobs = bool(layout.num_top_logprobs)
    raw = logits[layout.logprob_rows] if wants_logprobs else None  # a copy, taken before anything is masked
    if batch.adjustments is not None:
        batch.adjustments.apply(logits)
    tokens, peaks = _chooser(logits.device.type)(logits, batch)
    logprob_batch = None
    if raw is not None:
        logprob_batch = gather_logprobs(raw, tokens[layout.logprob_rows], max(layout.num_top_logprobs))
    failures = {} if batch.adjustments is None else batch.adjustments.failures
    return SampledTokens(layout, tokens, peaks, logprob_batch, failures, batch.adjustments is not None)


@cache
def _chooser(device_type: str) -> Callable[[Tensor, SamplingBatch], tuple[Tensor, Tensor]]:
    """How tokens are chosen on a kind of device: by our kernels where they run."""
    if device_type == "cuda" and find_spec("triton") is not None:
        from pagedserve.engine.sampling.kernel_choice import choose_by_kernels

        return choose_by_kernels
    return choose_in_torch


def choose_in_torch(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [R] and peaks float32 [R], each row's largest of ``logits`` [R, V], on any device."""
    peaks = logits.amax(dim=-1)
    broken = ~torch.isfinite(peaks)
    # Where asking would not mean waiting for a device, the common case is spared the work.
    if logits.device.type != "cpu" or broken.any():
        logits.masked_fill_(broken.unsqueeze(-1), 0.0)
    return _choose(logits, peaks.masked_fill(broken, 0.0), batch), peaks


def _choose(logits: Tensor, peaks: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens for every row of [R, V]; peaks are finite."""
    layout = batch.layout
    num_random = len(layout.random_rows)
    if num_random == 0:
        return logits.argmax(dim=-1)
    all_random = num_random == len(logits)
    tokens = torch.empty_like(peaks, dtype=torch.int64) if all_random else logits.argmax(dim=-1)
    ends = (layout.num_top_k, layout.num_top_k + layout.num_nucleus, num_random)
    for first, end in zip((0, *ends), ends, strict=False):
        for part in row_groups(first, end, logits):
            rows = layout.random_rows[part]
            tokens[rows] = _draw_part(logits[rows], peaks[rows], batch, part)
    return tokens


def _draw_part(logits: Tensor, peaks: Tensor, batch: SamplingBatch, part: slice) -> Tensor:
    """Tokens for the batch's random rows `part`, all of one kind, given their logits and peaks."""
    layout = batch.layout
    rows = RandomRows(
        logits=logits,
        peaks=peaks,
        temperature=layout.temperature[part],
        min_weight=layout.min_weight[part] if layout.has_min_p else None,
        top_k=layout.top_k[part],
        top_p=layout.top_p[part],
        words=batch.words[part],
    )
    if part.start < layout.num_top_k:
        return draw_top_k(rows, layout.largest_k)
    if part.start < layout.num_top_k + layout.num_nucleus:
        return draw_nucleus(rows)
    return draw_plain(rows)


def _explain(request: int, peak: float, failure: str | None, is_adjusted: bool) -> SamplingError:
    if failure is not None:
        return NothingAllowed(f"request {request}: its grammar cannot go on ({failure}); use a simpler one")
    if peak == -inf:
        problem = "no token is left to choose: every logit is -inf or masked; allow more token ids"
        return (NothingAllowed if is_adjusted else SamplingError)(f"request {request}: {problem}")
    if isnan(peak):
        problem = "the model's logits contain NaN; check the weights and the dtype"
    else:
        problem = "the model's logits contain +inf; check the weights and the dtype"
    return SamplingError(f"request {request}: {problem}")
