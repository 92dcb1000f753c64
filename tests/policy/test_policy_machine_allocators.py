"""Random lives of the allocators, against a model that knows holders, fences and keys and nothing else."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_scripts import scripted

from pagedserve.policy import Limits, Request, RequestState
from pagedserve.policy.blocks import Allocator, PagedAllocator
from pagedserve.policy.contiguous import ContiguousLimit, ContiguousMax

# No deadline: nothing here is timed. The short run is the same every time, the long one looks further.
SHORT = settings(
    deadline=None, report_multiple_bugs=False, derandomize=True, max_examples=150, stateful_step_count=40
)


@dataclass(slots=True)
class HolderState:
    """What an allocator may see of a request."""

    id: int
    request: Request
    limit: int
    block_keys: list[Hashable] | None
    num_known_tokens: int
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    last_step: int = -1

    @property
    def seen(self) -> RequestState:
        """Itself, as allocators call it."""
        return cast(RequestState, self)


class AllocatorMachine(RuleBasedStateMachine):
    """Steps are composed, launched and committed in order, at most two in flight, as a scheduler does."""

    allocator: Allocator

    def begin_with(self, allocator: Allocator, within: Limits, prefix_caching: bool) -> None:
        """Bind the allocator; the model starts with every block free."""
        allocator.bind(within, prefix_caching)
        self.allocator, self.within, self.caching = allocator, within, prefix_caching
        self.holders: dict[int, HolderState] = {}
        self.num_holders = 0
        self.newest = self.done = -1
        # Newest step that touches each block, by whoever held it; and what each published block is known as.
        self.touched_until = [-1] * within.num_blocks
        self.content: dict[int, Hashable] = {}
        self.to_publish: dict[int, list[tuple[int, Hashable]]] = {}

    @property
    def composing(self) -> int:
        """The step that is being put together."""
        return self.newest + 1

    def num_held(self) -> int:
        """Blocks in tables."""
        return len({block for holder in self.holders.values() for block in holder.block_table})

    def waiting_blocks(self) -> set[int]:
        """Blocks in no table that a step in flight touches."""
        held = {block for holder in self.holders.values() for block in holder.block_table}
        return {b for b, step in enumerate(self.touched_until) if step > self.done and b not in held}

    def check_new(self, blocks: tuple[int, ...]) -> None:
        """New blocks are in the pool, in no table, not touched by a step in flight, and forget their content."""
        held = {block for holder in self.holders.values() for block in holder.block_table}
        for block in blocks:
            assert 0 <= block < self.within.num_blocks
            assert block not in held, f"block {block} is held"
            assert self.touched_until[block] <= self.done, f"block {block} is touched by a step in flight"
            self.content.pop(block, None)
        assert len(set(blocks)) == len(blocks)

    def compute(self, holder: HolderState, until: int) -> None:
        """The composed step computes tokens; full blocks are published when it commits."""
        size, start = self.within.block_size, holder.num_computed_tokens
        self.allocator.num_live_tokens += until - start
        holder.num_computed_tokens, holder.last_step = until, self.composing
        for index in range(start // size, until // size):
            if holder.block_keys is not None:
                entry = holder.block_table[index], holder.block_keys[index]
                self.to_publish.setdefault(self.composing, []).append(entry)

    def let_go(self, holder: HolderState) -> None:
        """Release with the fence that a scheduler gives: the holder's newest step, if in flight."""
        table = list(holder.block_table)
        in_flight = holder.last_step > self.done
        releasable = self.allocator.num_releasable(holder.seen)
        del self.holders[holder.id]
        still = {block for other in self.holders.values() for block in other.block_table}
        assert releasable == len(set(table) - still)
        for block in table:
            self.touched_until[block] = max(self.touched_until[block], holder.last_step)
        self.allocator.release(holder.seen, holder.last_step if in_flight else None)
        assert not holder.block_table

    @precondition(lambda self: self.newest - self.done < 2)
    @rule()
    def launch(self) -> None:
        """The composed step is in flight."""
        self.newest += 1

    @precondition(lambda self: self.newest > self.done)
    @rule()
    def commit(self) -> None:
        """The oldest step in flight is done: publish, then free."""
        self.done += 1
        for block, key in self.to_publish.pop(self.done, []):
            self.allocator.publish([block], [key])
            if key not in self.content.values() and block not in self.content:
                self.content[block] = key
        self.allocator.committed(self.done)

    @precondition(lambda self: any(h.last_step < self.composing for h in self.holders.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A request ends, or is preempted, that the composed step does not compute."""
        able = [i for i, holder in self.holders.items() if holder.last_step < self.composing]
        self.let_go(self.holders[data.draw(st.sampled_from(able))])

    @invariant()
    def books(self) -> None:
        """All counters agree with the model."""
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.check([holder.seen for holder in self.holders.values()])
        held, waiting = self.num_held(), self.waiting_blocks()
        assert allocator.num_quarantined_blocks == len(waiting)
        assert allocator.num_free_blocks == self.within.num_blocks - held - len(waiting)
        assert allocator.fits(0, allocator.num_free_blocks)
        assert not allocator.fits(1, allocator.num_free_blocks)

    def teardown(self) -> None:
        """CASES A5: when all is released and committed, all is free."""
        if not hasattr(self, "allocator"):
            return
        self.newest += 1
        for holder in list(self.holders.values()):
            self.let_go(holder)
        while self.done < self.newest:
            self.commit()
        self.books()
        assert self.allocator.num_free_blocks == self.within.num_blocks
        assert self.allocator.num_live_tokens == 0


class PagedMachine(AllocatorMachine):
    """Texts are short words over two letters, a letter a block, so that prefixes meet often."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 3), caching=st.booleans())
    def begin(self, num_blocks: int, block_size: int, caching: bool) -> None:
        """A paged pool."""
        within = Limits(64, 8, 64, block_size=block_size, num_blocks=num_blocks)
        self.begin_with(PagedAllocator(), within, caching)

    @rule(
        word=st.text("ab", max_size=4),
        more=st.integers(0, 2),
        gone=st.booleans(),
        keyed=st.integers(0, 4).map(bool),
    )
    def admit(self, word: str, more: int, gone: bool, keyed: bool) -> None:
        """A request hits what it can and gets the rest; ``gone``: it is undone within the same step."""
        size, allocator = self.within.block_size, self.allocator
        known = len(word) * size + min(more, size - 1)
        if known == 0:
            return
        keys: list[Hashable] | None = [word[: i + 1] for i in range(len(word))] if keyed else None
        facts = scripted(self.num_holders, known, 1).request
        holder = HolderState(facts.id, facts, 1, keys, known)
        self.num_holders += 1
        hits = allocator.lookup(holder.seen)
        self.check_hits(hits, keys or [], known)
        need = allocator.num_missing(holder.seen, known) - len(hits) + allocator.num_reclaimed(hits)
        if not allocator.fits(need):
            assert need > allocator.num_free_blocks
            return
        allocator.take_hits(holder.seen, hits)
        holder.num_computed_tokens = len(hits) * size
        new = allocator.grow(holder.seen, known)
        self.check_new(new)
        assert holder.block_table == [*hits, *new]
        assert len(holder.block_table) == -(-known // size)
        self.holders[holder.id] = holder
        if gone:
            self.let_go(holder)
        else:
            self.compute(holder, known)

    def check_hits(self, hits: tuple[int, ...], keys: list[Hashable], known: int) -> None:
        """Exactly the longest chain of published keys, leaving a token to compute."""
        where = {key: block for block, key in self.content.items()} if self.caching else {}
        expected: list[int] = []
        for key in keys[: (known - 1) // self.within.block_size]:
            if key not in where:
                break
            expected.append(where[key])
        assert list(hits) == expected

    @precondition(lambda self: any(h.last_step < self.composing for h in self.holders.values()))
    @rule(data=st.data(), num_tokens=st.integers(1, 4), letter=st.sampled_from("ab"))
    def extend(self, data: st.DataObject, num_tokens: int, letter: str) -> None:
        """A request computes more tokens; blocks that they fill continue its word."""
        able = [i for i, holder in self.holders.items() if holder.last_step < self.composing]
        holder = self.holders[data.draw(st.sampled_from(able))]
        until = holder.num_computed_tokens + num_tokens
        if not self.allocator.fits(self.allocator.num_missing(holder.seen, until)):
            return
        before = list(holder.block_table)
        del self.holders[holder.id]
        new = self.allocator.grow(holder.seen, until)
        self.check_new(new)
        assert not set(new) & set(before)
        assert holder.block_table == before + list(new)
        self.holders[holder.id] = holder
        if holder.block_keys is not None:
            while len(holder.block_keys) < until // self.within.block_size:
                word = str(holder.block_keys[-1]) if holder.block_keys else ""
                holder.block_keys.append(word + letter)
        holder.num_known_tokens = until
        self.compute(holder, until)


class ContiguousMachine(AllocatorMachine):
    """Runs of blocks, reserved whole, first fit."""

    @initialize(num_blocks=st.integers(4, 12), block_size=st.integers(1, 3), whole_model=st.booleans())
    def begin(self, num_blocks: int, block_size: int, whole_model: bool) -> None:
        """One of the two contiguous pools."""
        longest = max(2, num_blocks * block_size // 3)
        self.reserves = longest if whole_model else None
        within = Limits(64, 8, longest, block_size=block_size, num_blocks=num_blocks)
        self.begin_with(ContiguousMax() if whole_model else ContiguousLimit(), within, False)

    @rule(prompt=st.integers(1, 8), limit=st.integers(1, 8))
    def admit(self, prompt: int, limit: int) -> None:
        """A request gets the lowest run that is long enough, or none is."""
        prompt = min(prompt, self.within.max_model_len - 1)
        size, total, allocator = self.within.block_size, self.within.num_blocks, self.allocator
        facts = scripted(self.num_holders, prompt, limit).request
        holder = HolderState(facts.id, facts, limit, None, prompt)
        self.num_holders += 1
        assert allocator.lookup(holder.seen) == ()
        reserved = self.reserves or prompt + limit
        need = min(total, -(-reserved // size))
        assert allocator.num_missing(holder.seen, prompt) == need
        taken = {
            block for other in self.holders.values() for block in other.block_table
        } | self.waiting_blocks()
        runs = [at for at in range(total - need + 1) if taken.isdisjoint(range(at, at + need))]
        assert allocator.fits(need) == bool(runs)
        if not runs:
            return
        new = allocator.grow(holder.seen, prompt)
        self.check_new(new)
        assert new == tuple(range(runs[0], runs[0] + need)), "not the first fit"
        self.holders[holder.id] = holder
        self.compute(holder, prompt)
        assert allocator.grow(holder.seen, prompt + 1) == ()


TestPaged = PagedMachine.TestCase
TestPaged.settings = SHORT
TestContiguous = ContiguousMachine.TestCase
TestContiguous.settings = SHORT


class DeepPagedMachine(PagedMachine):
    """The same, longer."""


class DeepContiguousMachine(ContiguousMachine):
    """The same, longer."""


LONG = settings(SHORT, derandomize=False, max_examples=3000, stateful_step_count=60)
TestPagedDeep = pytest.mark.timeout(3600)(pytest.mark.long(DeepPagedMachine.TestCase))
TestPagedDeep.settings = LONG
TestContiguousDeep = pytest.mark.timeout(3600)(pytest.mark.long(DeepContiguousMachine.TestCase))
TestContiguousDeep.settings = LONG
