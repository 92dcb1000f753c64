"""The decode group: every member computes one token a round, at a cost that follows what changes."""

from collections import defaultdict

from pagedserve.policy.plan import StepShape
from pagedserve.policy.request import RequestState


class DecodeGroup:
    """Running requests whose only uncomputed token is the last sampled one.

    Progress of members is implied by ``num_rounds``. What happens to a member at a known round (it needs
    another block, it reaches its output limit) waits in a calendar under that round. An entry is dead when
    its ticket is no longer the member's.
    """

    def __init__(self, block_size: int) -> None:
        self.members: dict[int, RequestState] = {}
        self.num_rounds = 0
        self.last_step: int | None = None
        self._block_size = block_size
        self._num_tickets = 0
        self._need_block: defaultdict[int, list[tuple[RequestState, int]]] = defaultdict(list)
        self._reach_limit: defaultdict[int, list[tuple[RequestState, int]]] = defaultdict(list)
        # A member's context is its offset plus num_rounds, so sums over members change only with membership.
        self._offset_sum = 0
        self._offset_sumsq = 0
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
        room = len(state.block_table) * self._block_size - state.base_computed
        self._need_block[self.num_rounds + room].append((state, self._num_tickets))
        limit_round = self.num_rounds + state.limit - state.base_sampled - 1
        self._reach_limit[limit_round].append((state, self._num_tickets))
        self._count(state.base_computed - state.mark, 1)
        self._ids = None
        self._joined[state.id] = None

    def leave(self, state: RequestState) -> None:
        """Remove a member and write its progress down."""
        assert state.group is self
        del self.members[state.id]
        self._count(state.base_computed - state.mark, -1)
        rounds, last_step = state.num_rounds, state.last_step
        state.base_computed += rounds
        state.base_sampled += rounds
        state.base_last_step = last_step
        state.group = state.group_ticket = None
        self._ids = None
        if state.id in self._joined:
            del self._joined[state.id]
        else:
            self._left.append(state.id)

    def _count(self, offset: int, sign: int) -> None:
        self._offset_sum += sign * offset
        self._offset_sumsq += sign * offset * offset
        if self._offset_max is None or (sign < 0 and offset == self._offset_max):
            self._offset_max = None
        elif sign > 0:
            self._offset_max = max(self._offset_max, offset)

    def pop_needing_block(self) -> list[RequestState]:
        """Members whose block table is full before the coming round, in admission order."""
        entries = self._need_block.pop(self.num_rounds, None)
        return self._alive(entries) if entries else []

    def filling_block(self) -> list[RequestState]:
        """Members that filled their last block in the round just done."""
        entries = self._need_block.get(self.num_rounds)
        return self._alive(entries) if entries else []

    def grown(self, state: RequestState) -> None:
        """A member got blocks: enter the round in which it needs the next."""
        assert state.group_ticket is not None
        room = len(state.block_table) * self._block_size - state.num_computed_tokens
        self._need_block[self.num_rounds + room].append((state, state.group_ticket))

    def run(self, step: int) -> list[RequestState]:
        """Do a round in ``step``; return members that have sampled up to their limit. They leave."""
        self.last_step = step
        ended = self._reach_limit.pop(self.num_rounds, None)
        self.num_rounds += 1
        if not ended:
            return []
        states = self._alive(ended)
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
        if not self._joined and not self._left:
            return (), ()
        changes = tuple(self._joined), tuple(self._left)
        self._joined.clear()
        self._left.clear()
        return changes

    def shape(self, chunks: tuple[tuple[int, int], ...], num_chunk_samples: int, runs: bool) -> StepShape:
        """The step's shape before the round is done; ``runs``: the group takes part."""
        n = len(self.members)
        if not runs or not n:
            return StepShape(chunks, num_samples=num_chunk_samples)
        if self._offset_max is None:
            self._offset_max = max(s.base_computed - s.mark for s in self.members.values())
        rounds, total = self.num_rounds, self._offset_sum
        return StepShape(
            chunks,
            n,
            total + n * rounds,
            self._offset_max + rounds,
            self._offset_sumsq + 2 * rounds * total + n * rounds * rounds,
            num_chunk_samples + n,
        )

    @staticmethod
    def _alive(entries: list[tuple[RequestState, int]]) -> list[RequestState]:
        states = [state for state, ticket in entries if state.group_ticket == ticket]
        if len(states) > 1:
            states.sort(key=lambda state: state.admission)
        return states
