"""Engines in wall time on a clock that passes only in their own sleeps, and what is handed in meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from pagedserve.engine.engine import Engine
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.tiny import tiny_model
from pagedserve.policy import Limits, Policy, policy
from pagedserve.simulator.cost import CostModel
from pagedserve.simulator.wall_time import WallTimeState
from pagedserve.traces.lengths import LengthDist
from pagedserve.validation.wall_time_engine import WallTimeModel, WallTimeRunner, wall_time_engine

EOS = 0
LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256, block_size=4, num_blocks=160)


class EventClock:
    """Time 0 is now; ``at`` says what happens when. Nothing takes time but sleeps."""

    def __init__(self) -> None:
        self.now, self.is_stopped = 0, False
        self._events: list[tuple[int, Callable[[], Any]]] = []

    def at(self, at_ns: int, event: Callable[[], Any]) -> None:
        """Have something happen once at ``at_ns``; times must not fall."""
        self._events.append((at_ns, event))

    def now_ns(self) -> int:
        return self.now

    def sleep_until(self, at_ns: int) -> None:
        while not self.is_stopped and self._events and self._events[0][0] <= at_ns:
            self.next_event()
        if not self.is_stopped:
            self.now = max(self.now, at_ns)

    def next_event(self) -> bool:
        """Go to the next event; False if there is none."""
        if not self._events:
            return False
        at_ns, event = self._events.pop(0)
        self.now = max(self.now, at_ns)
        event()
        return True

    def stop(self) -> None:
        self.is_stopped = True


@cache
def vocabulary(has_eos: bool = True) -> Vocabulary:
    """A token for each byte, the first of which is EOS."""
    return replace(tiny_model()[1], eos_token_ids=frozenset([EOS] if has_eos else []))


@contextmanager
def wall_engine(
    cost: CostModel,
    spec: str | Policy = "mixed",
    limits: Limits = LIMITS,
    *,
    lengths: LengthDist | None = None,
    depth: int = 0,
    seed: int = 0,
) -> Iterator[tuple[Engine[WallTimeRunner], EventClock]]:
    """An engine in wall time and its clock."""
    clock = EventClock()
    model = WallTimeModel(WallTimeState(cost, clock), 256, lengths)
    chosen = spec if isinstance(spec, Policy) else policy(spec)
    engine = wall_time_engine(model, vocabulary(), chosen, limits, overlap_depth=depth, seed=seed)
    try:
        yield engine, clock
    finally:
        engine.close()


def run_to_the_end(engine: Engine[WallTimeRunner], clock: EventClock) -> None:
    """Step through everything that happens, with every invariant examined."""
    while engine.has_work or clock.next_event():
        if not engine.step() and engine.has_work:
            assert clock.next_event(), f"stuck with {engine.num_live} live requests"
        engine.scheduler.check()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **options})
