"""What a worker knows: it sees plans only, and says whether they are sufficient and consistent.

The mirror keeps block tables, group membership and the content of every KV slot from plan deltas alone, and
recomputes from scratch what the scheduler keeps incrementally.
"""

from collections import Counter
from dataclasses import dataclass, field

from policy_scripts import Script

from pagedserve.policy import Limits, StepPlan, StepShape


@dataclass(slots=True)
class RowState:
    """One request as a worker mirrors it."""

    script: Script
    life: int
    """Differs for every tenure of a block table, so that a resumed request is not its former self."""
    known: int
    num_keys: int
    """Blocks whose key the scheduler knows."""
    table: list[int] = field(default_factory=list)
    computed: int = 0
    high_water: int = 0
    host: tuple[int, ...] = ()
    """Blocks of host memory that hold its KV."""
    swapped: int = 0
    """Tokens whose KV they hold."""

    @property
    def id(self) -> int:
        """The request's id."""
        return self.script.id


@dataclass(slots=True)
class FlightState:
    """What a step in flight touches (block to lives) and computes (request ids that sample)."""

    step: int
    touched: dict[int, set[int]] = field(default_factory=dict)


class Mirror:
    """Applies plans in order; AssertionError says what a worker could not make sense of.

    ``content``: compare what each row reads with its own text (off where keys collide on purpose).
    """

    def __init__(self, limits: Limits, prefix_caching: bool, content: bool = True) -> None:
        self.limits = limits
        self.prefix_caching = prefix_caching
        self.content = content
        self.scripts: dict[int, Script] = {}
        self.rows: dict[int, RowState] = {}
        self.group: dict[int, None] = {}
        self.flights: list[FlightState] = []
        self.last_committed = -1
        self._last_decodes: tuple[int, ...] = ()
        self._group_changed = False
        self._lives = 0
        # Per block and offset: (content, step that wrote it).
        self._slots: list[dict[int, tuple[int, int]]] = [{} for _ in range(limits.num_blocks)]
        self._host: list[dict[int, tuple[int, int]]] = [{} for _ in range(limits.num_cpu_blocks)]

    def apply(self, plan: StepPlan) -> None:
        """Take a launched plan, in the order of `StepPlan`'s docstring."""
        assert plan.step is not None
        assert plan.step == (self.flights[-1].step if self.flights else self.last_committed) + 1
        self._forget(plan)
        self._regroup(plan)
        self._meet(plan)
        self._append_blocks(plan)
        self._swap_out(plan)
        swapped_in = self._swap_in(plan)
        hits = sum(
            self._take_hits(chunk.request, chunk.start, swapped_in.get(chunk.request))
            for chunk in plan.chunks
        )
        assert hits == plan.num_prefix_hit_tokens
        assert plan.shape == self._shape(plan), f"shape {plan.shape} is not {self._shape(plan)}"
        self._check_limits(plan)
        self._compute(plan)

    def commit(self, step: int, num_keys: dict[int, int]) -> None:
        """The oldest step in flight is done; ``num_keys``: block keys given to the scheduler, by request."""
        assert self.flights.pop(0).step == step
        self.last_committed = step
        for request, number in num_keys.items():
            self.rows[request].num_keys += number

    # One method for each part of a plan.

    def _new_life(self) -> int:
        self._lives += 1
        return self._lives

    def _forget(self, plan: StepPlan) -> None:
        for request in plan.departed:
            assert request in self.rows, f"departed request {request} is not known"
            del self.rows[request]
        for request in plan.preempted:
            assert request in self.rows, f"preempted request {request} is not known"
            row = self.rows[request]
            row.high_water = max(row.high_water, row.computed)
            if any(swap.request == request for swap in plan.swapped_out):
                row.swapped = row.computed
            row.table, row.computed, row.life = [], 0, self._new_life()

    def _regroup(self, plan: StepPlan) -> None:
        for request in plan.left:
            assert request in self.group, f"request {request} left a group it was not in"
            del self.group[request]
        for request in plan.joined:
            assert request in self.rows, f"request {request} joined and is not known"
            assert request not in self.group, f"request {request} joined twice"
            self.group[request] = None
        # Who samples its first token, or wants a block, may join and leave again before a plan tells of it.
        changed = plan.left or plan.joined or plan.preempted or plan.departed
        self._group_changed = self._group_changed or bool(changed)
        if plan.decodes:
            assert plan.decodes == tuple(self.group), f"decodes {plan.decodes} are not {tuple(self.group)}"
            if not self._group_changed:
                assert plan.decodes is self._last_decodes, "an unchanged group is a new tuple object"
            self._last_decodes, self._group_changed = plan.decodes, False
        self._group_changed = self._group_changed or any(chunk.samples for chunk in plan.chunks)

    def _meet(self, plan: StepPlan) -> None:
        for request in plan.new_requests:
            assert request.id not in self.rows, f"request {request.id} is new twice"
            script = self.scripts[request.id]
            assert request is script.request, "the facts are not those that were added"
            num_keys = 0 if request.prefix_keys is None else len(request.prefix_keys)
            self.rows[request.id] = RowState(script, self._new_life(), request.num_prompt_tokens, num_keys)

    def _append_blocks(self, plan: StepPlan) -> None:
        owners = [owner for owner, _ in plan.new_blocks]
        assert len(owners) == len(set(owners)), "a request's new blocks are told in two parts"
        for owner, blocks in plan.new_blocks:
            assert blocks, f"request {owner} is said to get no blocks"
            assert all(0 <= block < self.limits.num_blocks for block in blocks), f"{blocks} out of the pool"
            self.rows[owner].table.extend(blocks)

    def _swap_out(self, plan: StepPlan) -> None:
        """Copy to host blocks that nobody holds."""
        for request, blocks, host in plan.swapped_out:
            row, held = self.rows[request], {block for row in self.rows.values() for block in row.host}
            assert request in plan.preempted, f"request {request} is swapped out and was not preempted"
            assert len(blocks) == len(host) == len({*host}) == -(-row.swapped // self.limits.block_size) > 0
            assert held.isdisjoint(host), f"host blocks {held & {*host}} are held"
            row.host = host
            for block, target in zip(blocks, host, strict=True):
                self._host[target] = dict(self._slots[block])

    def _swap_in(self, plan: StepPlan) -> dict[int, int]:
        """Copy into the ends of tables; return the tokens of each request that were cached and not copied."""
        size, cached = self.limits.block_size, {}
        for request, blocks, host in plan.swapped_in:
            row = self.rows[request]
            first = len(row.host) - len(blocks)
            assert host == row.host[first:], f"request {request} gets other host blocks than it left"
            assert list(blocks) == row.table[first : len(row.host)], f"{blocks} are not those of its table"
            self._check_unused(row, set(blocks))
            for block, source in zip(blocks, host, strict=True):
                assert plan.step is not None
                self._slots[block] = {at: (what, plan.step) for at, (what, _) in self._host[source].items()}
            cached[request] = first * size
        return cached

    def _take_hits(self, request: int, start: int, cached: int | None) -> int:
        """A chunk that starts behind what is computed rests on cached blocks: they must be done and right.

        ``cached``: tokens of them, if the others were copied from the host.
        """
        row, size = self.rows[request], self.limits.block_size
        if start == row.computed:
            assert not row.swapped, f"request {request} computes what lies on the host"
            return 0
        assert row.computed == 0, f"request {request} skips tokens {row.computed} to {start}"
        if cached is None:
            assert start >= row.swapped, f"request {request} computes what lies on the host"
            cached = start
        else:
            assert start == row.swapped, (
                f"request {request} starts at {start}, {row.swapped} were swapped out"
            )
        row.host, row.swapped = (), 0
        assert cached % size == 0, f"a hit of {cached} tokens is not of full blocks"
        assert start < row.known, f"the hit of request {request} leaves nothing to compute"
        for position in range(start):
            content, step = self._slots[row.table[position // size]].get(position % size, (None, 0))
            if self.content:
                assert content == row.script.contents()[position], (
                    f"request {request} hit foreign KV at {position}"
                )
            if position < cached:
                assert step <= self.last_committed, f"request {request} hit KV of step {step}, not committed"
        row.computed = start
        return cached

    def _shape(self, plan: StepPlan) -> StepShape:
        contexts = [self.rows[request].computed for request in plan.decodes]
        chunks = [(chunk.num_tokens, self.rows[chunk.request].computed) for chunk in plan.chunks]
        return StepShape(
            chunks=tuple(chunks),
            num_decodes=len(contexts),
            decode_context_sum=sum(contexts),
            decode_context_max=max(contexts, default=0),
            decode_context_sumsq=sum(context * context for context in contexts),
            num_samples=len(contexts) + sum(chunk.samples for chunk in plan.chunks),
            num_blocks_swapped_out=sum(len(swap.blocks) for swap in plan.swapped_out),
            num_blocks_swapped_in=sum(len(swap.blocks) for swap in plan.swapped_in),
        )

    def _check_limits(self, plan: StepPlan) -> None:
        limits = self.limits
        assert 0 < plan.shape.num_tokens <= limits.max_num_batched_tokens
        scheduled = [*plan.decodes, *(chunk.request for chunk in plan.chunks)]
        assert len(scheduled) == len(set(scheduled)), "a request is scheduled twice in a step"
        assert not set(self.group) & {chunk.request for chunk in plan.chunks}, (
            "a decoding request has a chunk"
        )
        assert sum(bool(row.table) for row in self.rows.values()) <= limits.max_num_seqs

    def _compute(self, plan: StepPlan) -> None:
        assert plan.step is not None
        flight = FlightState(plan.step)
        holders = Counter(block for row in self.rows.values() for block in row.table)
        written: dict[int, int] = {}
        sampled: set[int] = set()
        recomputed = 0
        filled: list[tuple[int, int]] = []
        work = [(chunk.request, chunk.num_tokens) for chunk in plan.chunks] + [(r, 1) for r in plan.decodes]
        for request, num_tokens in work:
            row = self.rows[request]
            self._check_context(row)
            start, end = row.computed, row.computed + num_tokens
            assert start < end <= row.known <= row.script.num_tokens, (
                f"request {request} computes {start} to {end}"
            )
            recomputed += max(0, min(end, row.high_water) - start)
            for block in self._write(row, end, plan.step):
                assert holders[block] == 1, f"block {block} is written and held {holders[block]} times"
                assert written.setdefault(block, request) == request, f"two requests write block {block}"
            filled += self._due(row, start, end)
            row.computed = end
            if end == row.known:
                sampled.add(request)
                row.known += 1
            for block in row.table[: -(-end // self.limits.block_size)]:
                flight.touched.setdefault(block, set()).add(row.life)
        said = {*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)}
        assert sampled == said, f"requests {sampled} reach their last known token, not {said}"
        assert recomputed == plan.num_recomputed_tokens, f"{recomputed} tokens are computed again"
        assert sorted(filled) == sorted(plan.filled), (
            f"blocks filled without a key: {filled}, not {plan.filled}"
        )
        self.flights.append(flight)

    def _check_context(self, row: RowState) -> None:
        """Every earlier token of a scheduled row can be read where its table says."""
        if not self.content:
            return
        size, contents = self.limits.block_size, row.script.contents()
        for position in range(row.computed):
            content = self._slots[row.table[position // size]].get(position % size, (None, 0))[0]
            assert content == contents[position], f"request {row.id} reads foreign KV at {position}"

    def _write(self, row: RowState, end: int, step: int) -> set[int]:
        """Write KV for the tokens up to ``end``; return the blocks written."""
        size, contents = self.limits.block_size, row.script.contents()
        assert end <= len(row.table) * size, f"request {row.id} has no slot for token {end - 1}"
        blocks: set[int] = set()
        for position in range(row.computed, end):
            block = row.table[position // size]
            self._slots[block][position % size] = contents[position], step
            blocks.add(block)
        self._check_unused(row, blocks)
        return blocks

    def _check_unused(self, row: RowState, blocks: set[int]) -> None:
        """No step in flight reads or writes for another what ``row`` is about to write."""
        for flight in self.flights:
            for block in blocks:
                others = flight.touched.get(block, set()) - {row.life}
                assert not others, f"block {block} is written while step {flight.step} in flight uses it"

    def _due(self, row: RowState, start: int, end: int) -> list[tuple[int, int]]:
        if not self.prefix_caching or row.script.request.prefix_keys is None:
            return []
        size = self.limits.block_size
        return [(row.id, index) for index in range(start // size, end // size) if index >= row.num_keys]
