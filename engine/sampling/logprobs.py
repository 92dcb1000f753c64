"""Log probabilities of the model's own distribution, with ranks, for sampled tokens or for a prompt's.

As vLLM's default (`raw_logprobs`): before temperature, filters and suppression. The log of the normaliser
comes from an exact integer sum, so a logprob does not depend on the batch either.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedserve.engine.sampling.fixed_point import SCALE_BITS, fixed_point_weights
from pagedserve.engine.sampling.groups import row_groups


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural log probability. rank: 1 is the most likely; the lower id comes first on ties."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What is reported of one position: the token there, and the most likely ones in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class LogprobBatch:
    """Log probabilities, still on the device. token_ids, chosen, ranks: [N]. top_ids, top: [N, T]."""

    token_ids: Tensor
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    @staticmethod
    def joined(batches: "Sequence[LogprobBatch]") -> "LogprobBatch":
        """One after the other; at least one, and all with the same number of likeliest tokens."""
        columns = ((b.token_ids, b.chosen, b.ranks, b.top_ids, b.top) for b in batches)
        return LogprobBatch(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def copied(self, take: Callable[[Tensor], Tensor]) -> "LogprobBatch":
        """The same, with what ``take`` makes of each tensor."""
        columns = (self.token_ids, self.chosen, self.ranks, self.top_ids, self.top)
        return LogprobBatch(*map(take, columns))

    def positions(self, num_top: Sequence[int]) -> list[PositionLogprobs]:
        """On the host, row i with its num_top[i] most likely tokens; waits for the device."""
        columns = (self.token_ids, self.chosen, self.ranks, self.top_ids, self.top)
        token_ids, chosen, ranks, top_ids, top = (column.tolist() for column in columns)
        return [
            PositionLogprobs(
                TokenLogprob(token_ids[row], chosen[row], ranks[row]),
                tuple(TokenLogprob(top_ids[row][i], top[row][i], i + 1) for i in range(count)),
            )
            for row, count in enumerate(num_top)
        ]


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobBatch:
    """The logprob and rank of token_ids [N] and the num_top most likely tokens under logits, float32 [N, V].

    Each row needs a finite peak; others give garbage in their own row. Logprobs are float64.
    """
    parts = [
        _gather_part(logits[part], token_ids[part].unsqueeze(-1), num_top)
        for part in row_groups(0, len(logits), logits)
    ]
    chosen, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobBatch(token_ids, chosen, ranks, top_ids, top)


def _gather_part(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chosen, ranks, top ids and top logprobs, for token_ids [N, 1]."""
    peak = logits.amax(dim=-1)
    totals = fixed_point_weights(logits, peak, torch.ones_like(peak)).sum(dim=-1)
    log_normaliser = (peak.double() + (totals.double().log() - SCALE_BITS * math.log(2.0))).unsqueeze(-1)
    own = logits.gather(-1, token_ids)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < token_ids))
    values, top_ids = top_tokens(logits, num_top)
    chosen = (own.double() - log_normaliser).squeeze(-1)
    return chosen, ahead.sum(dim=-1) + 1, top_ids, values.double() - log_normaliser


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [N, count] of each row's largest logits, float32 [N, V]; of equals the lower ids first.

    `torch.topk` leaves the order of equals open, and bfloat16 logits are full of them, so it gets integers
    that differ: the logit's bits, mapped to sort like the number, above the complement of the id.
    """
    if count == 0:
        nothing = logits.new_empty((len(logits), 0))
        return nothing, nothing.to(torch.int64)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0 in bits too
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | (0xFFFFFFFF - ids)
    top_ids = 0xFFFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, top_ids), top_ids
