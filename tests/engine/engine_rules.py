"""Batching rules of one's own: prompts in chunks of a given size, and preemption where a test wants it."""

import random

from pagedserve.policy import RequestState, Status, Step
from pagedserve.policy.batching import Mixed


class ChunksOf:
    """Mixed batching with every prompt cut into chunks of ``size`` tokens, whatever the budget."""

    def __init__(self, size: int) -> None:
        self.size = size

    def compose(self, step: Step) -> None:
        """Decode, then a chunk of every prompt in progress, then new ones."""
        step.decode()
        for state in step.prefilling():
            if step.num_tokens and state.status is Status.RUNNING:
                step.chunk(state, self.size)
        while (state := step.next_waiting()) is not None:
            if not step.admit(state, num_tokens=self.size):
                break


class PreemptAt:
    """A rule that also preempts one request, once: when it has ``num_outputs`` tokens (in flight included).

    ``after``: once the wrapped rule has composed the step, so that what it gave the victim is taken back.
    """

    def __init__(self, victim: int, num_outputs: int, after: bool = False, num_computed: int = 0) -> None:
        self.inner = Mixed()
        self.victim, self.num_outputs, self.num_computed, self.after = (
            victim,
            num_outputs,
            num_computed,
            after,
        )
        self.num_forced = 0

    def compose(self, step: Step) -> None:
        """The wrapped rule, and the preemption before or after it."""
        if self.after:
            self.inner.compose(step)
        for state in list(step.running):
            if self._is_due(state):
                step.preempt(state)
                self.num_forced += 1
        if not self.after:
            self.inner.compose(step)

    def _is_due(self, state: RequestState) -> bool:
        return (
            state.id == self.victim
            and not self.num_forced
            and state.num_output_tokens == self.num_outputs
            and state.num_computed_tokens >= self.num_computed
        )


class PreemptAtRandom:
    """Preempts any running request with a chance of ``share`` in every step, before and after the rule.

    After it at least one stays, so that a step in which all gave way is made up for when composed again.
    """

    def __init__(self, seed: int, share: float) -> None:
        self.inner = Mixed()
        self.rng, self.share = random.Random(seed), share

    def compose(self, step: Step) -> None:
        """Preempt, compose, preempt."""
        self._preempt_some(step, list(step.running))
        self.inner.compose(step)
        self._preempt_some(step, list(step.running)[1:])

    def _preempt_some(self, step: Step, states: list[RequestState]) -> None:
        for state in states:
            if state.num_output_tokens < state.limit and self.rng.random() < self.share:
                step.preempt(state)
