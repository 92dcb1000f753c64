"""The decode group: every member computes one token a round, at a cost that follows what changes."""

from collections import defaultdict

from pagedserve.policy.plan import StepShape
from pagedserve.policy.request import RequestState

Calendar = defaultdict[int, list[tuple[RequestState, int]]]


class DecodeGroup:
    """Running requests whose only uncomputed token is the last sampled one.

    What happens to a member at a known round (it needs another block, it reaches its output limit) waits in
    a calendar under that round; an entry is dead when its ticket is no longer the member's.
    """

    def __init__(self, block_size: int) -> None:
        self.members: dict[int, RequestState] = {}
        self.num_rounds = 0
        self.last_step: int | None = None
        self._block_size = block_size
        self._num_tickets = 0
        self._need_block: Calendar = defaultdict(list)
        self._reach_limit: Calendar = defaultdict(list)
        # A member's context is its offset plus num_rounds, so sums over members change only with membership.
        self._offset_sum = self._offset_sumsq = 0
        self._offset_max: int | None = None
        self._ids: tuple[int, ...] | None = ()
        self._joined: dict[int, None] = {}
        self._left: list[int] = []

    def __len__(self) -> int:
        return len(self.members)

    def join(self, state: RequestState, first_step: int) -> None:
        """Add a request with exactly one uncomputed token; ``first_step`` began its run of samples."""
        assert state.group is None
        assert state.num_remaining_tokens == 1
        self._num_tickets += 1
        state.group, state.mark, state.group_ticket = self, self.num_rounds, self._num_tickets
        state.samples_since = first_step
        self.members[state.id] = state
        self.grown(state)
        self._reach_limit[self.num_rounds + state.limit - state.base_sampled - 1].append(
            (state, self._num_tickets)
        )
        self._count(state.base_computed - state.mark, 1)
        self._ids = None
        self._joined[state.id] = None

    def leave(self, state: RequestState) -> None:
        """Remove a member and write its progress down."""
        del self.members[state.id]
        self._count(state.base_computed - state.mark, -1)
        rounds, state.base_last_step = state.num_rounds, state.last_step
        state.base_computed += rounds
        state.base_sampled += rounds
        state.group = state.group_ticket = self._ids = None
        if state.id in self._joined:
            del self._joined[state.id]
        else:
            self._left.append(state.id)

    def _count(self, offset: int, sign: int) -> None:
        self._offset_sum += sign * offset
        self._offset_sumsq += sign * offset * offset
        if self._offset_max is not None:
            gone = sign < 0 and offset == self._offset_max
            self._offset_max = None if gone else max(self._offset_max, offset)

    def grown(self, state: RequestState) -> None:
        """A member holds more blocks: enter the round in which it needs the next."""
        assert state.group_ticket is not None
        room = len(state.block_table) * self._block_size - state.num_computed_tokens
        self._need_block[self.num_rounds + room].append((state, state.group_ticket))

    def needing_block(self) -> list[RequestState]:
        """Members whose block table is full before the coming round, in admission order."""
        entries = self._need_block.get(self.num_rounds)
        return _alive(entries) if entries else []

    def run(self, step: int) -> list[RequestState]:
        """Do a round in ``step``; members that have now sampled up to their limit leave and are returned."""
        self.last_step = step
        self._need_block.pop(self.num_rounds, None)
        ended = self._reach_limit.pop(self.num_rounds, None)
        self.num_rounds += 1
        states = _alive(ended) if ended else []
        for state in states:
            self.leave(state)
        return states

    def rounds_to_next_limit(self) -> int:
        """Rounds that can be done before a member reaches its limit, the round that does it excluded."""
        live = [r for r, entries in self._reach_limit.items() if any(s.group_ticket == t for s, t in entries)]
        return min(live) - self.num_rounds if live else 0

    def ids(self) -> tuple[int, ...]:
        """Member ids in the order of joining; the same object until membership changes."""
        if self._ids is None:
            self._ids = tuple(self.members)
        return self._ids

    def take_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that joined and that left since the last call."""
        changes = tuple(self._joined), tuple(self._left)
        self._joined.clear()
        self._left.clear()
        return changes

    def shape(self, chunks: tuple[tuple[int, int], ...], num_chunk_samples: int, runs: bool) -> StepShape:
        """The step's shape before the round is done; ``runs``: the group takes part."""
        n, rounds, total = len(self.members), self.num_rounds, self._offset_sum
        if not runs or not n:
            return StepShape(chunks, num_samples=num_chunk_samples)
        if self._offset_max is None:
            self._offset_max = max(s.base_computed - s.mark for s in self.members.values())
        square = self._offset_sumsq + 2 * rounds * total + n * rounds * rounds
        return StepShape(
            chunks, n, total + n * rounds, self._offset_max + rounds, square, num_chunk_samples + n
        )


def _alive(entries: list[tuple[RequestState, int]]) -> list[RequestState]:
    states = [state for state, ticket in entries if state.group_ticket == ticket]
    if len(states) > 1:
        states.sort(key=lambda state: state.admission)
    return states
