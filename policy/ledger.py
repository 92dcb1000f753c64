"""Who holds which block, kept apart from the allocator so that a faulty allocator is found out."""

from collections.abc import Collection

from pagedserve.policy.errors import IllegalPlan
from pagedserve.policy.request import RequestState


class BlockLedger:
    """Checks every grant against the block tables and against the steps in flight; set operations only."""

    def __init__(self, num_blocks: int, who: str) -> None:
        self._num_blocks, self._who = num_blocks, who
        self._held: set[int] = set()
        self._more_holders: dict[int, int] = {}
        self._touched: dict[int, set[int]] = {}

    def granted(self, state: RequestState, num_tokens: int, block_size: int, new: Collection[int]) -> None:
        """Blocks were appended so that ``num_tokens`` fit."""
        if new:
            touched = [step for step, blocks in self._touched.items() if not blocks.isdisjoint(new)]
            if not self._held.isdisjoint(new) or touched or len(new) != len({*new}):
                fault = f"held already: {sorted(self._held & {*new})}; touched by steps in flight {touched}"
                raise IllegalPlan(f"{self._who} gave request {state.id} blocks {new}; {fault}")
            if not 0 <= min(new) <= max(new) < self._num_blocks:
                fault = f"the pool has blocks 0 to {self._num_blocks - 1}"
                raise IllegalPlan(f"{self._who} gave request {state.id} blocks {new}; {fault}")
            self._held.update(new)
        if len(state.block_table) * block_size < num_tokens:
            has = f"{len(state.block_table)} blocks of {block_size} for {num_tokens} tokens"
            raise IllegalPlan(f"{self._who} left request {state.id} with {has}")

    def shared(self, hits: Collection[int]) -> None:
        """Cached blocks are appended to one more table."""
        if hits and not 0 <= min(hits) <= max(hits) < self._num_blocks:
            raise IllegalPlan(f"{self._who} found blocks {hits} in a pool of {self._num_blocks}")
        for block in hits:
            if block in self._held:
                self._more_holders[block] = self._more_holders.get(block, 0) + 1
            self._held.add(block)

    def returned(self, blocks: Collection[int], fence: int | None) -> None:
        """A table was given up; steps in flight up to ``fence`` touch its blocks."""
        gone = blocks
        if self._more_holders:
            gone = [block for block in blocks if not self._drop_holder(block)]
        self._held.difference_update(gone)
        if fence is not None:
            self._touched.setdefault(fence, set()).update(blocks)

    def _drop_holder(self, block: int) -> bool:
        """Take one further holder away, if there is one."""
        more = self._more_holders.pop(block, 0)
        if more > 1:
            self._more_holders[block] = more - 1
        return more > 0

    def committed(self, step: int) -> None:
        """Step ``step`` is done."""
        self._touched.pop(step, None)
