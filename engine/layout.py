"""Which requests a step samples, and which rows of its hidden states they are sampled from."""

from __future__ import annotations

import numpy as np

from pagedserve.policy import StepPlan


def sampled_by(plan: StepPlan) -> tuple[int, ...]:
    """The requests that get a token, in the order of their rows: chunks that end their known tokens, decodes."""
    return (*(chunk.request for chunk in plan.chunks if chunk.samples), *plan.decodes)


def sampling_sequences(plan: StepPlan) -> np.ndarray:
    """int64 [R]: for each of those, its place among the step's sequences, which are its chunks and decodes."""
    samples = [chunk.samples for chunk in plan.chunks] + [True] * len(plan.decodes)
    return np.flatnonzero(np.array(samples))
