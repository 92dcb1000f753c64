"""Batching rules: which running and waiting requests share a step.

A rule is a class with ``compose(step)``, which spends the step's budget through the verbs of
`pagedserve.policy.step.Step`. An optional ``steady_for(step) -> int`` says for how many further steps it
would compose the same, unless something is added, aborted or stopped.
"""

from typing import Protocol

from pagedserve.policy.step import Step

UNBOUNDED = 1 << 62


class BatchingRule(Protocol):
    """Fills one step."""

    def compose(self, step: Step) -> None:
        """Choose this step's work by calling the step's verbs."""
        ...


class Serial:
    """One request at a time, from its prompt to its last token."""

    def compose(self, step: Step) -> None:
        if step.num_running == 0:
            step.admit_in_order(max_requests=1)
        else:
            step.continue_prefills()
            step.decode()

    def steady_for(self, step: Step) -> int:
        """Waiting requests change nothing while one runs."""
        return UNBOUNDED


class Static:
    """Batches of up to ``max_num_seqs`` requests; the next forms when the last is wholly finished.

    A batch is as many requests as wait at the moment it forms and fit the pool. Their prompts are computed
    first (over several steps if the token budget asks for it), then all decode together. A finished row
    computes nothing and gives its blocks back, but its seat stays empty. A preempted request goes to the
    next batch.
    """

    def __init__(self) -> None:
        self._num_to_admit = 0

    def compose(self, step: Step) -> None:
        if step.num_running == 0:
            self._num_to_admit = min(step.num_waiting, step.num_seats)
        step.continue_prefills()
        if self._num_to_admit:
            self._num_to_admit -= step.admit_in_order(max_requests=self._num_to_admit)
        if step.num_tokens or not step.chunks:
            # Tokens are left, so seats or blocks are not: the batch is closed.
            self._num_to_admit = 0
        if not step.chunks:
            step.decode()

    def steady_for(self, step: Step) -> int:
        """Waiting requests change nothing once a batch is complete."""
        return 0 if self._num_to_admit else UNBOUNDED


class PrefillFirst:
    """Continuous batching without mixing: a step computes prompts while any can be, otherwise decodes.

    Prompts are not cut, save one that is longer than the whole token budget. New requests therefore stall
    the running ones (Orca, early vLLM): short TTFT, long gaps between tokens.
    """

    def compose(self, step: Step) -> None:
        step.continue_prefills()
        step.admit_in_order(whole=True)
        if not step.chunks:
            step.decode()

    def steady_for(self, step: Step) -> int:
        """A waiting request may be admitted at any step."""
        return 0 if step.num_waiting else UNBOUNDED


class Mixed:
    """Continuous batching with chunked prefill under one token budget: decodes, chunks in progress, new ones.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024) and vLLM V1. The gap between a running request's tokens
    is bounded by one budgeted step.
    """

    def compose(self, step: Step) -> None:
        step.decode()
        step.continue_prefills()
        step.admit_in_order()

    def steady_for(self, step: Step) -> int:
        """A waiting request may be admitted at any step."""
        return 0 if step.num_waiting else UNBOUNDED
