"""Log probabilities of a prompt's own tokens, taken as its chunks are computed.

The hidden state at position p tells of the token at p + 1. Prefix-cached positions have none, so a request that
asks does not use the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pagedserve.engine.packing import send
from pagedserve.engine.sampling.logprobs import LogprobBatch, PositionLogprobs, gather_logprobs
from pagedserve.policy import StepPlan

if TYPE_CHECKING:
    from pagedserve.engine.model.model import Model
    from pagedserve.engine.sequences import SequenceState

# Rows whose logits exist at a time: a vocabulary of 128k takes 32 MiB of float32.
GROUP_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Of one chunk: the step's rows ``first`` to ``first + len(targets)`` tell of these prompt tokens."""

    request: int
    first: int
    targets: tuple[int, ...]
    num_top: int

    def logprobs(self, model: Model, hidden: Tensor, vocab_size: int) -> LogprobBatch:
        """Of all targets, from the step's hidden states [T, D], on their device."""
        (ids,) = send([np.array(self.targets, dtype=np.int64)], hidden.device)
        return LogprobBatch.joined(
            [
                gather_logprobs(
                    model.logits(hidden[part])[:, :vocab_size],
                    ids[part.start - self.first : part.stop - self.first],
                    self.num_top,
                )
                for part in self.parts()
            ]
        )

    def positions(self, batch: LogprobBatch) -> list[PositionLogprobs]:
        """One entry for each target, from what `logprobs` gave, on the host."""
        return batch.positions([self.num_top] * len(self.targets))

    def parts(self) -> Iterator[slice]:
        """The rows of hidden states, in groups whose logits are made one after the other."""
        end = self.first + len(self.targets)
        for start in range(self.first, end, GROUP_ROWS):
            yield slice(start, min(start + GROUP_ROWS, end))


def prompt_rows(plan: StepPlan, sequences: Mapping[int, SequenceState]) -> list[PromptRows]:
    """What is still wanted of a step's chunks; what was computed before a preemption is not wanted again."""
    wanted, row = [], 0
    for chunk in plan.chunks:
        sequence = sequences[chunk.request]
        num_top = sequence.params.prompt_logprobs
        if num_top is not None:
            # Position p of the prompt tells of token p + 1; the first len(prompt_logprobs) positions have told.
            begin = max(chunk.start, len(sequence.prompt_logprobs))
            end = min(chunk.start + chunk.num_tokens, sequence.request.num_prompt_tokens - 1)
            if begin < end:
                targets = tuple(sequence.token_ids[begin + 1 : end + 1])
                wanted.append(PromptRows(chunk.request, row + begin - chunk.start, targets, num_top))
        row += chunk.num_tokens
    return wanted
