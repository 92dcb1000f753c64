"""A scheduled step until its commit, and what its outcomes mean."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from pagedserve.policy.blocks import Allocator
from pagedserve.policy.plan import Outcome, StepPlan
from pagedserve.policy.request import RequestState


@dataclass(slots=True)
class InFlightState:
    """A step in flight: the blocks it fills, as (request, first block index, blocks), and who ends with it.

    ``dead`` requests ended while the step was in flight: their token of it is discarded.
    """

    plan: StepPlan
    filled: list[tuple[RequestState, int, list[int]]] = field(default_factory=list)
    ends: list[RequestState] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)

    def samples(self, state: RequestState) -> bool:
        """Whether the step samples a token of the request."""
        first, last, step = state.samples_since, state.last_step, self.plan.step
        if step in state.earlier_samples:
            return True
        if first is None or last is None or step is None or not first <= step <= last:
            return False
        return step == first or bool(self.plan.decodes)

    def check_outcomes(self, told: Mapping[int, Outcome], live: Container[int]) -> None:
        """Every outcome must belong to the step, and every key that is due must be there, or ValueError."""
        plan, due = self.plan, dict.fromkeys(told, 0)
        for request, _ in plan.filled:
            if request in live and request not in self.dead:
                due[request] = due.get(request, 0) + 1
        tokens = {chunk.request: int(chunk.samples) for chunk in plan.chunks}
        for request, num_keys in due.items():
            if request in plan.decodes:
                tokens[request] = 1
            given = told.get(request, Outcome(request, tokens.get(request, 0)))
            fails = given.num_tokens == 0 and given.stop_reason is not None
            if request not in tokens or (given.num_tokens != tokens[request] and not fails):
                raise ValueError(
                    f"{given}: step {plan.step} samples {tokens.get(request)} tokens of {request}"
                )
            if given.stop_reason is not None and not tokens[request]:
                raise ValueError(f"{given}: step {plan.step} samples nothing for it, so it cannot stop there")
            if request not in self.dead and len(given.new_block_keys) != num_keys:
                raise ValueError(f"{given}: step {plan.step} filled {num_keys} blocks that need a key")

    def keys_due(self) -> list[tuple[int, int]]:
        """(request, block index) of filled blocks whose key is not known; call it at planning."""
        return [
            (state.id, index)
            for state, first, blocks in self.filled
            if state.block_keys is not None and first + len(blocks) > len(state.block_keys)
            for index in range(max(first, len(state.block_keys)), first + len(blocks))
        ]

    def publish(self, told: Mapping[int, Outcome], allocator: Allocator) -> None:
        """Put the blocks that the step filled under their keys."""
        for state, first, blocks in self.filled:
            if state.block_keys is None:
                continue
            if first + len(blocks) > len(state.block_keys) and state.id in told and state.id not in self.dead:
                state.block_keys += told[state.id].new_block_keys
            keys = state.block_keys[first : first + len(blocks)]
            if keys:
                allocator.publish(blocks[: len(keys)], keys)
