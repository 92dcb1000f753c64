"""Allocators that reserve one contiguous run of blocks: what paging is measured against."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable

from pagedserve.policy.limits import Limits
from pagedserve.policy.request import RequestState


class ContiguousAllocator(ABC):
    """One run of consecutive blocks a request, first fit, reserved whole at admission.

    A sub-class says how many tokens to reserve. Nothing grows later, so nothing is ever preempted for want
    of memory; the price is slots reserved and never written, and holes between runs.
    """

    @abstractmethod
    def reserved_tokens(self, state: RequestState) -> int:
        """Tokens to reserve for a request; capped at the pool's."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        """See `Allocator.bind`."""
        if prefix_caching:
            raise ValueError(f"{type(self).__name__} cannot share blocks; turn enable_prefix_caching off")
        self.block_size = limits.block_size
        self.num_blocks = limits.num_blocks
        self.max_model_len = limits.max_model_len
        self.num_releases = 0
        self.num_live_tokens = 0
        self._holes: list[tuple[int, int]] = [(0, self.num_blocks)]
        self._num_free = self.num_blocks
        self._fences: deque[tuple[int, int, int]] = deque()
        self._num_quarantined = 0

    @property
    def num_free_blocks(self) -> int:
        """See `Allocator`."""
        return self._num_free

    @property
    def num_cached_blocks(self) -> int:
        """See `Allocator`: contiguous runs are not cached."""
        return 0

    @property
    def num_quarantined_blocks(self) -> int:
        """See `Allocator`."""
        return self._num_quarantined

    def fits(self, num_blocks: int, keep_free: int = 0) -> bool:
        """See `Allocator.fits`; the blocks must also lie side by side."""
        if num_blocks + keep_free > self._num_free:
            return False
        return num_blocks == 0 or any(size >= num_blocks for _, size in self._holes)

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """See `Allocator.num_missing`: the whole reservation, or nothing once it is held."""
        if state.block_table:
            return 0
        reserved = min(self.reserved_tokens(state), self.num_blocks * self.block_size)
        return -(-max(num_tokens, reserved) // self.block_size)

    def lookup(self, state: RequestState) -> tuple[int, ...]:
        """See `Allocator.lookup`: never a hit."""
        return ()

    def num_reclaimed(self, hits: Iterable[int]) -> int:
        """See `Allocator.num_reclaimed`."""
        return 0

    def take_hits(self, state: RequestState, hits: tuple[int, ...]) -> None:
        """See `Allocator.take_hits`."""
        assert not hits

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """See `Allocator.grow`."""
        need = self.num_missing(state, num_tokens)
        if not need:
            return ()
        index = next(i for i, (_, size) in enumerate(self._holes) if size >= need)
        start, size = self._holes.pop(index)
        if size > need:
            self._holes.insert(index, (start + need, size - need))
        self._num_free -= need
        state.block_table = list(range(start, start + need))
        return tuple(state.block_table)

    def release(self, state: RequestState, fence: int | None) -> None:
        """See `Allocator.release`."""
        if not state.block_table:
            return
        start, size = state.block_table[0], len(state.block_table)
        self.num_live_tokens -= state.num_computed_tokens
        state.block_table = []
        self.num_releases += 1
        if fence is None:
            self._make_hole(start, size)
        else:
            self._fences.append((fence, start, size))
            self._num_quarantined += size

    def _make_hole(self, start: int, size: int) -> None:
        at = bisect_left(self._holes, (start, 0))
        self._num_free += size
        if at < len(self._holes) and self._holes[at][0] == start + size:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == start:
            before, length = self._holes.pop(at - 1)
            start, size = before, length + size
        insort(self._holes, (start, size))

    def num_releasable(self, state: RequestState) -> int:
        """See `Allocator.num_releasable`."""
        return len(state.block_table)

    def publish(self, block: int, key: Hashable) -> None:
        """See `Allocator.publish`: nothing is cached."""

    def committed(self, step: int) -> None:
        """See `Allocator.committed`."""
        while self._fences and self._fences[0][0] <= step:
            _, start, size = self._fences.popleft()
            self._num_quarantined -= size
            self._make_hole(start, size)
            self.num_releases += 1

    def check(self, running: Iterable[RequestState]) -> None:
        """See `Allocator.check`."""
        runs = [(start, size) for start, size in self._holes]
        runs += [(start, size) for _, start, size in self._fences]
        live = 0
        for state in running:
            table = state.block_table
            assert table == list(range(table[0], table[0] + len(table))), f"run of {state.id} has a gap"
            assert len(table) * self.block_size >= state.num_computed_tokens
            runs.append((table[0], len(table)))
            live += state.num_computed_tokens
        runs.sort()
        position = 0
        for start, size in runs:
            assert start == position, f"block {min(start, position)} is in two runs or in none"
            position += size
        assert position == self.num_blocks
        assert live == self.num_live_tokens, "live tokens differ from the block tables"
        assert sum(size for _, size in self._holes) == self._num_free
        assert sum(size for _, _, size in self._fences) == self._num_quarantined


class ContiguousMax(ContiguousAllocator):
    """Reserves ``max_model_len`` tokens for every request, as static servers did."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        """See `Allocator.bind`; the pool must hold one reservation."""
        super().bind(limits, prefix_caching)
        if limits.num_slots < limits.max_model_len:
            raise ValueError(
                f"contiguous_max reserves max_model_len {limits.max_model_len} tokens a request, and the "
                f"pool has {limits.num_slots}; raise num_blocks or lower max_model_len"
            )

    def reserved_tokens(self, state: RequestState) -> int:
        """The model's maximum length."""
        return self.max_model_len


class ContiguousLimit(ContiguousAllocator):
    """Reserves prompt plus the declared output limit."""

    def reserved_tokens(self, state: RequestState) -> int:
        """Prompt plus output limit."""
        return state.request.num_prompt_tokens + state.limit
