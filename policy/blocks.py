"""The KV pool: what every allocator offers, and the paged one with its prefix cache."""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import chain

from pagedserve.policy.limits import Limits
from pagedserve.policy.request import RequestState


class Allocator(ABC):
    """Owner of the KV pool. A block is free, cached (free, but with content that may be hit) or used.

    Used includes quarantined: released, but still touched by a step in flight. The defaults are those of an
    allocator that shares nothing.
    """

    num_free_blocks: int
    """Blocks that can be given out now, cached ones included."""
    num_cached_blocks: int = 0
    """Free blocks whose content may still be hit."""
    num_quarantined_blocks: int = 0
    """Released blocks that wait for a step in flight."""
    num_live_tokens: int = 0
    """Slots of referenced blocks that hold a token; shared blocks count once."""
    num_releases: int = 0
    """Grows whenever blocks may have become available, so that a refused admission is not tried in vain."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        """Take the pool's size; called once, before anything else."""
        if prefix_caching:
            raise ValueError(f"{type(self).__name__} cannot share blocks; turn enable_prefix_caching off")
        self.block_size, self.num_blocks = limits.block_size, limits.num_blocks
        self.num_free_blocks = limits.num_blocks

    def fits(self, num_blocks: int, keep_free: int = 0) -> bool:
        """Whether ``num_blocks`` can be given out now and leave ``keep_free``."""
        return num_blocks + keep_free <= self.num_free_blocks

    @abstractmethod
    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """Blocks to add so that the request's table holds ``num_tokens``."""

    @abstractmethod
    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Append blocks so that the table holds ``num_tokens``, only after ``fits``; return the new ones."""

    @abstractmethod
    def release(self, state: RequestState, fence: int | None) -> None:
        """Give up the whole table; its blocks wait for the commit of step ``fence``, if any."""

    @abstractmethod
    def committed(self, step: int) -> None:
        """Step ``step`` is done: what waited for it becomes free."""

    @abstractmethod
    def check(self, running: Collection[RequestState]) -> None:
        """Recompute every invariant from the block tables; AssertionError names what is off."""

    def num_releasable(self, state: RequestState) -> int:
        """Blocks that only this request refers to."""
        return len(state.block_table)

    def lookup(self, state: RequestState) -> tuple[int, ...]:
        """Cached blocks that hold the start of its known tokens; at least one token stays to compute."""
        return ()

    def num_reclaimed(self, hits: Iterable[int]) -> int:
        """How many of the hit blocks are free now, and so are taken from the free ones."""
        return 0

    def take_hits(self, state: RequestState, hits: tuple[int, ...]) -> None:
        """Append hit blocks to the empty table of a request."""

    def publish(self, blocks: Sequence[int], keys: Sequence[Hashable]) -> None:
        """The blocks' contents are computed and may be found under the keys."""

    def cached_blocks(self) -> list[int]:
        """The cached blocks, the next to be evicted first; `num_cached_blocks` of them."""
        return []

    def quarantined_blocks(self) -> list[int]:
        """The quarantined blocks, in no order; `num_quarantined_blocks` of them."""
        return []


class PagedAllocator(Allocator):
    """Fixed-size blocks with reference counts and an optional prefix cache.

    Source: paged memory after vLLM (Kwon et al., SOSP 2023). Cached blocks are evicted least recently
    released first, a request's tail before its head. A second block with the same content keeps no key
    (duplicates are not merged). Waste is bounded by the last block of each request.
    """

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        super().bind(limits, False)
        self.prefix_caching = prefix_caching
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._used: set[int] = set()
        self._more_refs: dict[int, int] = {}
        """References beyond the first, of blocks that have more than one."""
        self._quarantine: dict[int, int] = {}
        self._fences: defaultdict[int, list[int]] = defaultdict(list)
        self._late: dict[int, int] = {}
        """Of blocks still held by others: the newest step in flight of an owner that is gone."""
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(state.block_table))

    def lookup(self, state: RequestState) -> tuple[int, ...]:
        if not self.prefix_caching or state.block_keys is None:
            return ()
        hits: list[int] = []
        for key in state.block_keys[: (state.num_known_tokens - 1) // self.block_size]:
            block = self._block_of.get(key)
            if block is None:
                break
            hits.append(block)
        return tuple(hits)

    def num_reclaimed(self, hits: Iterable[int]) -> int:
        return sum([block in self._cached for block in hits])

    def take_hits(self, state: RequestState, hits: tuple[int, ...]) -> None:
        for block in hits:
            if block in self._used:
                self._more_refs[block] = self._more_refs.get(block, 0) + 1
                continue
            self._used.add(block)
            self.num_live_tokens += self.block_size
            if block in self._cached:
                del self._cached[block]
            else:
                self._late[block] = self._quarantine.pop(block)
        state.block_table.extend(hits)
        self._count()

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        need = self.num_missing(state, num_tokens)
        if need > len(self._free):
            self._evict(need - len(self._free))
        blocks = self._free[: -need - 1 : -1] if need else []
        del self._free[len(self._free) - need :]
        self._used.update(blocks)
        state.block_table += blocks
        self._count()
        return tuple(blocks)

    def _evict(self, num_blocks: int) -> None:
        """Forget the content of the cached blocks released longest ago."""
        for block in [self._cached.popitem(last=False)[0] for _ in range(num_blocks)]:
            del self._block_of[self._key_of.pop(block)]
            self._free.append(block)

    def release(self, state: RequestState, fence: int | None) -> None:
        table, size, computed = state.block_table, self.block_size, state.num_computed_tokens
        assert table, f"blocks of request {state.id} were released twice"
        assert self._used.issuperset(table), f"blocks of request {state.id} were released twice"
        self.num_live_tokens -= computed
        if self._more_refs:
            own: list[int] = []
            for index, block in enumerate(table):
                if block in self._more_refs:
                    self.num_live_tokens += max(0, min(size, computed - index * size))
                    self._drop_ref(block, fence)
                else:
                    own.append(block)
            table = own
        table = table[::-1]
        self._used.difference_update(table)
        if self._late:
            for block in [block for block in table if block in self._late]:
                last = self._late.pop(block)
                if fence is None or last > fence:
                    table.remove(block)
                    self._set_aside([block], last)
        if fence is None:
            self._make_free(table)
        else:
            self._set_aside(table, fence)
        state.block_table = []
        self.num_releases += 1
        self._count()

    def _drop_ref(self, block: int, fence: int | None) -> None:
        self._more_refs[block] -= 1
        if not self._more_refs[block]:
            del self._more_refs[block]
        if fence is not None:
            self._late[block] = max(fence, self._late.get(block, -1))

    def _set_aside(self, blocks: Sequence[int], fence: int) -> None:
        self._quarantine.update(dict.fromkeys(blocks, fence))
        self._fences[fence] += blocks

    def _make_free(self, blocks: Iterable[int]) -> None:
        if not self._key_of:
            self._free.extend(blocks)
            return
        for block in blocks:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _count(self) -> None:
        self.num_cached_blocks, self.num_quarantined_blocks = len(self._cached), len(self._quarantine)
        self.num_free_blocks = len(self._free) + self.num_cached_blocks

    def num_releasable(self, state: RequestState) -> int:
        shared = sum([block in self._more_refs for block in state.block_table]) if self._more_refs else 0
        return len(state.block_table) - shared

    def publish(self, blocks: Sequence[int], keys: Sequence[Hashable]) -> None:
        block_of, key_of = self._block_of, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            if key not in block_of and block not in key_of:
                block_of[key] = block
                key_of[block] = key
        self.num_releases += 1

    def cached_blocks(self) -> list[int]:
        return list(self._cached)

    def quarantined_blocks(self) -> list[int]:
        return list(self._quarantine)

    def committed(self, step: int) -> None:
        if self._late:
            self._late = {block: last for block, last in self._late.items() if last > step}
        # A block that was hit meanwhile is in use again, or waits once more, perhaps for a later step.
        waited = dict.fromkeys(self._fences.pop(step, ()))
        freed = [block for block in waited if self._quarantine.get(block) == step]
        if freed:
            for block in freed:
                del self._quarantine[block]
            self._make_free(freed)
            self.num_releases += 1
            self._count()

    def check(self, running: Collection[RequestState]) -> None:
        tables = [state.block_table for state in running]
        for state, table in zip(running, tables, strict=True):
            room = len(table) * self.block_size
            assert room >= state.num_computed_tokens, f"request {state.id} lacks slots"
        refs = Counter(chain.from_iterable(tables))
        used, more = set(refs), {block: count - 1 for block, count in refs.items() if count > 1}
        assert (used, more) == (self._used, self._more_refs), "references differ from the block tables"
        parts = [*self._free, *self._cached, *self._quarantine, *used]
        whole = (
            len(parts) == len({*parts}) == self.num_blocks and 0 <= min(parts) <= max(parts) < self.num_blocks
        )
        assert whole, "free + cached + used + quarantined is not total"
        # Only full blocks are shared, so every holder beyond the first counts a whole block too many.
        live = sum([state.num_computed_tokens for state in running]) - self.block_size * sum(more.values())
        assert live == self.num_live_tokens, "live tokens differ from the block tables"
        assert self._late.keys() <= used, "a block that nobody holds waits for a step of a former owner"
        assert all(block in self._key_of for block in self._cached), "a cached block has no key"
        assert not any(block in self._key_of for block in self._free), "a free block has a key"
        assert {b: k for k, b in self._block_of.items()} == self._key_of, "keys and blocks do not correspond"
        counts = self.num_free_blocks, self.num_cached_blocks, self.num_quarantined_blocks
        self._count()
        assert counts == (self.num_free_blocks, self.num_cached_blocks, self.num_quarantined_blocks)
