"""Preemption modes, and the host memory into which a preempted request's KV may be copied.

Copies are planned here, executed by the engine and costed by the simulator. A worker runs them in device order:
those of a plan after all earlier steps and before the plan's own, out before in. So a host block may be
written again as soon as it is given up, save by the very plan that reads it.
"""

from collections.abc import Collection
from typing import Protocol

from pagedserve.policy.plan import Swap
from pagedserve.policy.request import RequestState


class PreemptionMode(Protocol):
    """What becomes of a victim's KV."""

    def swaps(self, victim: RequestState, num_blocks: int, num_free_host_blocks: int) -> bool:
        """Whether to copy the ``num_blocks`` blocks that hold its KV to host memory.

        If not, or if they do not fit, the victim computes its tokens again when it resumes.
        """
        ...


class Recompute:
    """KV is dropped, and computed again on resumption (vLLM V1)."""

    def swaps(self, victim: RequestState, num_blocks: int, num_free_host_blocks: int) -> bool:
        """Never."""
        return False


class SwapToHost:
    """KV is copied to host memory while there is room, and back on resumption (vLLM V0's swap mode)."""

    def swaps(self, victim: RequestState, num_blocks: int, num_free_host_blocks: int) -> bool:
        """Whenever it fits."""
        return num_blocks <= num_free_host_blocks


class HostPool:
    """Blocks of host memory and whose KV they hold: ``RequestState.host_blocks``, ``num_swapped_tokens``."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # Copies that the next launched plan tells of, by request.
        self._out: dict[int, Swap] = {}
        self._in: dict[int, tuple[Swap, tuple[int, ...], int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Host blocks that can be written by the next plan."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Host blocks that hold KV."""
        return self.num_blocks - len(self._free)

    def take_out(self, state: RequestState, blocks: Collection[int], num_tokens: int) -> None:
        """Plan the copy of a victim's blocks, which hold its first ``num_tokens`` tokens; only if they fit."""
        count = len(blocks)
        assert 0 < count <= len(self._free)
        assert not state.host_blocks
        state.host_blocks, state.num_swapped_tokens = tuple(self._free[: -count - 1 : -1]), num_tokens
        del self._free[-count:]
        self._out[state.id] = Swap(state.id, tuple(blocks), state.host_blocks)

    def bring_back(self, state: RequestState, num_hits: int, block_size: int) -> None:
        """Plan the copy into a resumed request's table, whose first ``num_hits`` blocks were found cached."""
        held, num_tokens = state.host_blocks, state.num_swapped_tokens
        if held:
            blocks = tuple(state.block_table[num_hits : -(-num_tokens // block_size)])
            self._in[state.id] = Swap(state.id, blocks, held[num_hits:]), held, num_tokens
            state.host_blocks, state.num_swapped_tokens = (), 0

    def undo(self, state: RequestState) -> None:
        """The step that seated it preempts it: what was to be brought back stays on the host."""
        if state.id in self._in:
            _, state.host_blocks, state.num_swapped_tokens = self._in.pop(state.id)

    def drop(self, state: RequestState) -> None:
        """It ended: nobody will want its KV."""
        self._out.pop(state.id, None)
        self._free += state.host_blocks[::-1]
        state.host_blocks, state.num_swapped_tokens = (), 0

    def take_plan(self) -> tuple[tuple[Swap, ...], tuple[Swap, ...], dict[int, int]]:
        """The copies out and in of the plan being launched, and by request the index of its first block copied in."""
        if not self._out and not self._in:
            return (), (), {}
        out = tuple(self._out.values())
        back = tuple([swap for swap, _, _ in self._in.values() if swap.blocks])
        first = {s.request: len(held) - len(s.blocks) for s, held, _ in self._in.values() if s.blocks}
        for _, held, _ in self._in.values():
            self._free += held[::-1]
        self._out.clear()
        self._in.clear()
        return out, back, first

    def check(self, states: Collection[RequestState], block_size: int) -> None:
        """Recompute every invariant; AssertionError names what is off. Not between composing and launching."""
        held = [block for state in states for block in state.host_blocks]
        assert sorted([*self._free, *held]) == list(range(self.num_blocks)), (
            "a host block is lost or held twice"
        )
        assert not self._in, "a request was brought back by a step that was not launched"
        for state in states:
            assert len(state.host_blocks) == -(-state.num_swapped_tokens // block_size)
            assert not (state.host_blocks and state.block_table), f"request {state.id} has KV in both places"
            assert state.num_swapped_tokens < state.num_known_tokens
        away = {state.id for state in states if state.host_blocks}
        assert self._out.keys() <= away, "a copy is planned for a request that has no host blocks"
