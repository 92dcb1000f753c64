"""Who holds which block, kept apart from the allocator so that a faulty allocator is found out."""

from collections.abc import Iterable

from pagedserve.policy.errors import IllegalPlan
from pagedserve.policy.request import RequestState


class BlockLedger:
    """Checks every grant against the block tables and against the steps in flight."""

    def __init__(self, num_blocks: int, who: str) -> None:
        self._who = who
        self._holders = [0] * num_blocks
        self._touched_until = [-1] * num_blocks

    def granted(
        self, state: RequestState, num_tokens: int, block_size: int, new: Iterable[int], done: int
    ) -> None:
        """Blocks were appended so that ``num_tokens`` fit; steps up to ``done`` have committed."""
        for block in new:
            if not 0 <= block < len(self._holders):
                fault = f"the pool has blocks 0 to {len(self._holders) - 1}"
            elif self._holders[block] or self._touched_until[block] > done:
                fault = (
                    f"{self._holders[block]} requests hold it; step {self._touched_until[block]} touches it"
                )
            else:
                self._holders[block] = 1
                continue
            raise IllegalPlan(f"{self._who} gave block {block} to request {state.id}; {fault}")
        if len(state.block_table) * block_size < num_tokens:
            has = f"{len(state.block_table)} blocks of {block_size} for {num_tokens} tokens"
            raise IllegalPlan(f"{self._who} left request {state.id} with {has}")

    def shared(self, hits: Iterable[int]) -> None:
        """Cached blocks were appended to one more table."""
        for block in hits:
            self._holders[block] += 1

    def returned(self, blocks: Iterable[int], last_step: int | None) -> None:
        """A table was given up; steps up to ``last_step`` touch its blocks."""
        for block in blocks:
            self._holders[block] -= 1
            if last_step is not None and last_step > self._touched_until[block]:
                self._touched_until[block] = last_step
