"""Allocators that reserve one contiguous run of blocks: what paging is measured against."""

from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection

from pagedserve.policy.blocks import Allocator
from pagedserve.policy.limits import Limits
from pagedserve.policy.request import RequestState


class ContiguousAllocator(Allocator):
    """One run of consecutive blocks a request, first fit, reserved whole at admission.

    Nothing grows later, so nothing is ever preempted for want of memory; the price is slots reserved and
    never written, and holes between runs.
    """

    @abstractmethod
    def num_reserved_tokens(self, state: RequestState) -> int:
        """Tokens to reserve for a request; capped at the pool's."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        super().bind(limits, prefix_caching)
        self.max_model_len = limits.max_model_len
        self._holes: list[tuple[int, int]] = [(0, self.num_blocks)]
        self._runs: dict[int, int] = {}
        self._fences: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def fits(self, num_blocks: int, keep_free: int = 0) -> bool:
        side_by_side = num_blocks == 0 or any(size >= num_blocks for _, size in self._holes)
        return side_by_side and super().fits(num_blocks, keep_free)

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        if state.block_table:
            return 0
        reserved = min(self.num_reserved_tokens(state), self.num_blocks * self.block_size)
        return -(-max(num_tokens, reserved) // self.block_size)

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        need = self.num_missing(state, num_tokens)
        if not need:
            return ()
        index = next(i for i, (_, size) in enumerate(self._holes) if size >= need)
        start, size = self._holes[index]
        self._holes[index : index + 1] = [(start + need, size - need)] if size > need else []
        self.num_free_blocks -= need
        self._runs[start] = need
        state.block_table = list(range(start, start + need))
        return tuple(state.block_table)

    def release(self, state: RequestState, fence: int | None) -> None:
        start, size = state.block_table[0] if state.block_table else -1, len(state.block_table)
        assert self._runs.pop(start, None) == size, f"blocks of request {state.id} were released twice"
        self.num_live_tokens -= state.num_computed_tokens
        state.block_table = []
        self.num_releases += 1
        if fence is None:
            self._make_hole(start, size)
        else:
            self._fences[fence].append((start, size))
            self.num_quarantined_blocks += size

    def _make_hole(self, start: int, size: int) -> None:
        self.num_free_blocks += size
        at = bisect_left(self._holes, (start, 0))
        first = last = at
        if at and sum(self._holes[at - 1]) == start:
            first, start, size = at - 1, self._holes[at - 1][0], self._holes[at - 1][1] + size
        if at < len(self._holes) and self._holes[at][0] == start + size:
            last, size = at + 1, size + self._holes[at][1]
        self._holes[first:last] = [(start, size)]

    def committed(self, step: int) -> None:
        for start, size in self._fences.pop(step, ()):
            self.num_quarantined_blocks -= size
            self._make_hole(start, size)
            self.num_releases += 1

    def quarantined_blocks(self) -> list[int]:
        runs = [run for waiting in self._fences.values() for run in waiting]
        return [block for start, size in runs for block in range(start, start + size)]

    def check(self, running: Collection[RequestState]) -> None:
        quarantined = [run for runs in self._fences.values() for run in runs]
        runs, live = [*self._holes, *quarantined], 0
        for state in running:
            table = state.block_table
            assert table == list(range(table[0], table[0] + len(table))), f"run of {state.id} has a gap"
            assert len(table) * self.block_size >= state.num_computed_tokens
            runs.append((table[0], len(table)))
            live += state.num_computed_tokens
        blocks = [block for start, size in runs for block in range(start, start + size)]
        assert sorted(blocks) == list(range(self.num_blocks)), "a block is in two runs or in none"
        assert live == self.num_live_tokens, "live tokens differ from the block tables"
        assert sum(size for _, size in self._holes) == self.num_free_blocks
        assert sum(size for _, size in quarantined) == self.num_quarantined_blocks


class ContiguousMax(ContiguousAllocator):
    """Reserves ``max_model_len`` tokens for every request, as static servers did."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        super().bind(limits, prefix_caching)
        if limits.num_slots < limits.max_model_len:
            raise ValueError(
                f"contiguous_max reserves max_model_len {limits.max_model_len} tokens a request, and the "
                f"pool has {limits.num_slots}; raise num_blocks or lower max_model_len"
            )

    def num_reserved_tokens(self, state: RequestState) -> int:
        return self.max_model_len


class ContiguousLimit(ContiguousAllocator):
    """Reserves prompt plus the declared output limit."""

    def num_reserved_tokens(self, state: RequestState) -> int:
        return state.request.num_prompt_tokens + state.limit
