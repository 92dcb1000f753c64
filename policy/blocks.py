"""What an allocator offers, and the paged one: fixed-size blocks, shared by reference count."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from typing import Protocol

from pagedserve.policy.limits import Limits
from pagedserve.policy.request import RequestState


class Allocator(Protocol):
    """Owner of the KV pool. Blocks are free, cached (free, but with content that may be hit) or used.

    Used includes quarantined blocks: released, but still touched by a step in flight.
    """

    num_blocks: int
    num_releases: int
    """Grows whenever blocks may have become available, so that a refused admission is not tried in vain."""
    num_live_tokens: int
    """Slots of referenced blocks that hold a token; shared blocks count once."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        """Take the pool's size; called once, before anything else."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out now, cached ones included."""
        ...

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content may still be hit."""
        ...

    @property
    def num_quarantined_blocks(self) -> int:
        """Released blocks that wait for a step in flight."""
        ...

    def fits(self, num_blocks: int, keep_free: int = 0) -> bool:
        """Whether ``num_blocks`` can be given out now and leave ``keep_free``."""
        ...

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """Blocks to add so that the request's table holds ``num_tokens``."""
        ...

    def lookup(self, state: RequestState) -> tuple[int, ...]:
        """Cached blocks that hold the start of its known tokens; at least one token stays to compute."""
        ...

    def num_reclaimed(self, hits: Iterable[int]) -> int:
        """How many of the hit blocks are free now, and would be taken from the free ones."""
        ...

    def take_hits(self, state: RequestState, hits: tuple[int, ...]) -> None:
        """Append hit blocks to the empty table of a request."""
        ...

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Append blocks so that the table holds ``num_tokens``; only after ``fits``. Return the new ones."""
        ...

    def release(self, state: RequestState, fence: int | None) -> None:
        """Give up the whole table; its blocks wait for the commit of step ``fence``, if any."""
        ...

    def num_releasable(self, state: RequestState) -> int:
        """Blocks that only this request refers to."""
        ...

    def publish(self, block: int, key: Hashable) -> None:
        """The block's content is computed and may be found under ``key``."""
        ...

    def committed(self, step: int) -> None:
        """Step ``step`` is done: what waited for it becomes free."""
        ...

    def check(self, running: Iterable[RequestState]) -> None:
        """Recompute every invariant from the block tables; AssertionError names what is off."""
        ...


class PagedAllocator:
    """Fixed-size blocks with reference counts and an optional prefix cache.

    Source: paged memory after vLLM (Kwon et al., SOSP 2023); cached blocks are evicted least recently
    released first, a request's tail before its head. A second block with the same content keeps no key
    (duplicates are not merged). Waste is bounded by the last block of each request.
    """

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        """See `Allocator.bind`."""
        self.block_size = limits.block_size
        self.num_blocks = limits.num_blocks
        self.prefix_caching = prefix_caching
        self.num_releases = 0
        self.num_live_tokens = 0
        self._refs = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantine: dict[int, int] = {}
        self._fences: deque[tuple[int, int]] = deque()
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def num_free_blocks(self) -> int:
        """See `Allocator`."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """See `Allocator`."""
        return len(self._cached)

    @property
    def num_quarantined_blocks(self) -> int:
        """See `Allocator`."""
        return len(self._quarantine)

    def fits(self, num_blocks: int, keep_free: int = 0) -> bool:
        """See `Allocator.fits`."""
        return num_blocks + keep_free <= len(self._free) + len(self._cached)

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """See `Allocator.num_missing`."""
        return max(0, -(-num_tokens // self.block_size) - len(state.block_table))

    def lookup(self, state: RequestState) -> tuple[int, ...]:
        """See `Allocator.lookup`. The longest chain of keys found counts."""
        if not self.prefix_caching or state.block_keys is None:
            return ()
        find, hits = self._block_of.get, []
        for key in state.block_keys[: (state.num_known_tokens - 1) // self.block_size]:
            block = find(key)
            if block is None:
                break
            hits.append(block)
        return tuple(hits)

    def num_reclaimed(self, hits: Iterable[int]) -> int:
        """See `Allocator.num_reclaimed`."""
        return sum(1 for block in hits if block in self._cached)

    def take_hits(self, state: RequestState, hits: tuple[int, ...]) -> None:
        """See `Allocator.take_hits`."""
        for block in hits:
            if self._refs[block] == 0:
                self.num_live_tokens += self.block_size
                if self._quarantine.pop(block, None) is None:
                    del self._cached[block]
            self._refs[block] += 1
        state.block_table.extend(hits)

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """See `Allocator.grow`."""
        blocks = tuple([self._take() for _ in range(self.num_missing(state, num_tokens))])
        state.block_table.extend(blocks)
        return blocks

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        assert self._refs[block] == 0, f"block {block} was given out twice"
        self._refs[block] = 1
        return block

    def release(self, state: RequestState, fence: int | None) -> None:
        """See `Allocator.release`."""
        refs, size, computed = self._refs, self.block_size, state.num_computed_tokens
        for index in range(len(state.block_table) - 1, -1, -1):
            block = state.block_table[index]
            assert refs[block] > 0, f"block {block} of request {state.id} was released twice"
            refs[block] -= 1
            if refs[block] == 0:
                self.num_live_tokens -= max(0, min(size, computed - index * size))
                if fence is None:
                    self._make_free(block)
                else:
                    self._quarantine[block] = fence
                    self._fences.append((fence, block))
        state.block_table = []
        self.num_releases += 1

    def _make_free(self, block: int) -> None:
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def num_releasable(self, state: RequestState) -> int:
        """See `Allocator.num_releasable`."""
        refs = self._refs
        return sum(1 for block in state.block_table if refs[block] == 1)

    def publish(self, block: int, key: Hashable) -> None:
        """See `Allocator.publish`. A key that is known already, or a block that has one, changes nothing."""
        if self.prefix_caching and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self.num_releases += 1

    def committed(self, step: int) -> None:
        """See `Allocator.committed`."""
        while self._fences and self._fences[0][0] <= step:
            fence, block = self._fences.popleft()
            if self._quarantine.get(block) == fence:
                del self._quarantine[block]
                self._make_free(block)
                self.num_releases += 1

    def check(self, running: Iterable[RequestState]) -> None:
        """See `Allocator.check`."""
        refs = [0] * self.num_blocks
        filled: dict[int, int] = {}
        for state in running:
            held = len(state.block_table) * self.block_size
            assert held >= state.num_computed_tokens, f"request {state.id} has {held} slots for its tokens"
            for index, block in enumerate(state.block_table):
                refs[block] += 1
                here = max(0, min(self.block_size, state.num_computed_tokens - index * self.block_size))
                filled[block] = max(filled.get(block, 0), here)
        assert refs == self._refs, "reference counts differ from the block tables"
        used = sum(1 for count in refs if count)
        parts = [*self._free, *self._cached, *self._quarantine, *(b for b, count in enumerate(refs) if count)]
        assert len(parts) == len(set(parts)) == self.num_blocks, (
            f"{len(self._free)} free + {len(self._cached)} cached + {used} used + "
            f"{len(self._quarantine)} quarantined blocks are not {self.num_blocks}"
        )
        assert sum(filled.values()) == self.num_live_tokens, "live tokens differ from the block tables"
        assert all(block in self._key_of for block in self._cached), "a cached block has no key"
        assert not any(block in self._key_of for block in self._free), "a free block has a key"
        assert {b: k for k, b in self._block_of.items()} == self._key_of, "keys and blocks do not correspond"
