"""Log probabilities of a prompt's own tokens, taken as its chunks are computed.

The hidden state at position p tells of the token at p + 1. Prefix-cached positions have none, so a request that
asks does not use the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedserve.engine.model.model import Model
from pagedserve.engine.sampling.logprobs import PositionLogprobs, gather_logprobs
from pagedserve.engine.sequences import SequenceState
from pagedserve.policy import StepPlan

# Rows whose logits exist at a time: a vocabulary of 128k takes 32 MiB of float32.
GROUP_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Of one chunk: the step's rows ``first`` to ``first + len(targets)`` tell of these prompt tokens."""

    request: int
    first: int
    targets: tuple[int, ...]
    num_top: int

    def logprobs(self, model: Model, hidden: Tensor, vocab_size: int) -> list[PositionLogprobs]:
        """One entry for each target, from the step's hidden states [T, D]."""
        found: list[PositionLogprobs] = []
        for start in range(0, len(self.targets), GROUP_ROWS):
            targets = self.targets[start : start + GROUP_ROWS]
            first = self.first + start
            logits = model.logits(hidden[first : first + len(targets)])[:, :vocab_size]
            ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
            found += gather_logprobs(logits, ids, self.num_top).positions([self.num_top] * len(targets))
        return found


def prompt_rows(plan: StepPlan, sequences: Mapping[int, SequenceState]) -> list[PromptRows]:
    """What is still wanted of a step's chunks; what was computed before a preemption is not wanted again."""
    wanted, row = [], 0
    for chunk in plan.chunks:
        sequence = sequences[chunk.request]
        num_top = sequence.params.prompt_logprobs
        if num_top is not None and not sequence.ended:
            # Position p of the prompt tells of token p + 1; the first len(prompt_logprobs) positions have told.
            begin = max(chunk.start, len(sequence.prompt_logprobs))
            end = min(chunk.start + chunk.num_tokens, sequence.request.num_prompt_tokens - 1)
            if begin < end:
                targets = tuple(sequence.token_ids[begin + 1 : end + 1])
                wanted.append(PromptRows(chunk.request, row + begin - chunk.start, targets, num_top))
        row += chunk.num_tokens
    return wanted
