"""Which requests a step samples, and which rows of its hidden states they are sampled from."""

from __future__ import annotations

import numpy as np
import torch

from pagedserve.policy import StepPlan


def sampled_by(plan: StepPlan) -> tuple[int, ...]:
    """The requests that get a token, in the order of their rows: chunks that end their known tokens, decodes."""
    return (*(chunk.request for chunk in plan.chunks if chunk.samples), *plan.decodes)


def last_rows_of(plan: StepPlan) -> torch.Tensor:
    """int64 [R]: for each of those, the row of its last token among the step's tokens."""
    lengths = [chunk.num_tokens for chunk in plan.chunks] + [1] * len(plan.decodes)
    samples = [chunk.samples for chunk in plan.chunks] + [True] * len(plan.decodes)
    return torch.from_numpy((np.cumsum(lengths) - 1)[np.flatnonzero(np.array(samples))])
