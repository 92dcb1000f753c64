"""What the server needs of whatever makes the tokens, and the engine in a thread as one of those."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.engine import Engine, EngineDead
from pagedserve.engine.outputs import Delta
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.server.engine_view import EngineView, GlimpseState, glimpse
from pagedserve.engine.server.observer import EngineCountsState, EngineObserver
from pagedserve.engine.structured_outputs import StructuredOutputs
from pagedserve.policy import Limits
from pagedserve.policy.spec import PARTS, Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What never changes while a backend runs."""

    limits: Limits
    vocab_size: int
    policy: str
    """Its label, for people and metrics."""
    caches_prefixes: bool
    policy_parts: tuple[tuple[str, str], ...] = ()
    """What the policy is made of, for people."""


@dataclass(frozen=True, slots=True)
class BackendStats:
    """The present moment: sequences and KV blocks, as of the last step; and what was counted so far.

    ``counts`` goes on counting. ``num_used_blocks`` includes blocks that wait for a step in flight; free
    excludes cached.
    """

    running: Mapping[str, int]
    """By tenant."""
    waiting: Mapping[str, int]
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_wasted_slots: int
    num_swapped: int
    """Of the waiting, those whose KV lies in host memory."""
    num_used_cpu_blocks: int
    """Blocks of host memory that hold KV of preempted sequences."""
    counts: EngineCountsState

    @property
    def num_running(self) -> int:
        """Sequences of all tenants that hold blocks."""
        return sum(self.running.values())

    @property
    def num_waiting(self) -> int:
        """Sequences of all tenants that wait."""
        return sum(self.waiting.values())


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What goes with a prompt beside its sampling."""

    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None


class EngineBackend(Protocol):
    """Makes tokens for the server; all methods are called in the event loop and none may block it."""

    @property
    def facts(self) -> BackendFacts:
        """What never changes."""
        ...

    @property
    def fault(self) -> BaseException | None:
        """The error that ended the engine, if one did: nothing runs any more."""
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: SubmitOptions,
        leave_reason: Callable[[], str] = lambda: "abort",
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of all ``params.n`` sequences; each ends with one that has a finish reason.

        Closing the iterator early aborts what has not ended, with the reason that ``leave_reason`` gives then.
        Raises ValueError before the first delta for what can never run, and `EngineDead`.
        """
        ...

    async def check(self, params: SamplingParams) -> None:
        """Raise ValueError for what cannot be honoured, before a request counts as accepted."""
        ...

    async def warm_up(self) -> None:
        """Make what a first request would wait for, with all others, before connections are taken."""
        ...

    def abort(self, request: int, reason: str = "abort") -> None:
        """Ask for a sequence's end, with that finish reason."""
        ...

    def stats(self) -> BackendStats:
        """The present moment; cheap."""
        ...

    async def view(self) -> EngineView:
        """Every block and sequence between two steps; waits for the step that runs."""
        ...


class ThreadBackend:
    """An `AsyncEngine` as a backend.

    Make it before anything is handed to the engine: it counts from the first request on.
    """

    def __init__(self, served: AsyncEngine, policy: str) -> None:
        """``policy``: its label. Raises RuntimeError for an engine that has begun to work."""
        engine = served.engine
        if engine.has_work:
            raise RuntimeError("the engine has begun to work; make its backend before anything is handed in")
        self._served = served
        loop = engine.loop
        self._observer = EngineObserver(engine.scheduler, loop.recorder)
        loop.recorder = self._observer
        caches = engine.scheduler.policy.enable_prefix_caching
        parts = parts_of(engine.scheduler.policy)
        self._facts = BackendFacts(engine.limits, engine.vocabulary.size, policy, caches, parts)
        self._fault: EngineDead | None = None

    @property
    def facts(self) -> BackendFacts:
        """See `EngineBackend.facts`."""
        return self._facts

    @property
    def fault(self) -> BaseException | None:
        """See `EngineBackend.fault`."""
        return self._served.error or self._fault

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: SubmitOptions,
        leave_reason: Callable[[], str] = lambda: "abort",
    ) -> AsyncGenerator[Delta, None]:
        """See `EngineBackend.stream`."""
        deltas = self._served.stream(
            prompt,
            params,
            leave_reason=leave_reason,
            priority=options.priority,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
        )
        try:
            async for delta in deltas:
                yield delta
        except EngineDead as dead:
            self._fault = dead
            raise
        finally:
            await deltas.aclose()

    async def check(self, params: SamplingParams) -> None:
        """See `EngineBackend.check`; a grammar is compiled in a worker thread."""
        if params.structured_outputs is None:
            self._served.engine.check(params)
        else:
            await asyncio.to_thread(self._served.engine.check, params)

    async def warm_up(self) -> None:
        """See `EngineBackend.warm_up`: the table of all tokens by which forms of output are followed.

        Making it keeps the interpreter's lock for a tenth of a second and more at a time, also in a thread.
        """
        try:
            await self.check(SamplingParams(structured_outputs=StructuredOutputs(json_object=True)))
        except ValueError as error:  # a model without an end, or no model: clients that ask are told
            logger.info("no structured outputs: %s", error)

    def abort(self, request: int, reason: str = "abort") -> None:
        """See `EngineBackend.abort`."""
        self._served.abort(request, reason)

    def stats(self) -> BackendStats:
        """See `EngineBackend.stats`. Read while the engine may be in the middle of a step."""
        scheduler = self._served.engine.scheduler
        free, cached = scheduler.allocator.num_free_blocks, scheduler.allocator.num_cached_blocks
        # The list is made in one piece, whatever the engine's thread does.
        running, waiting, num_swapped = Counter[str](), Counter[str](), 0
        for state in list(scheduler.states.values()):
            (running if state.queue_ticket is None else waiting)[state.request.tenant] += 1
            num_swapped += bool(state.host_blocks)
        return BackendStats(
            running=running,
            waiting=waiting,
            num_used_blocks=self._facts.limits.num_blocks - free,
            num_cached_blocks=cached,
            num_free_blocks=max(0, free - cached),
            num_wasted_slots=max(0, scheduler.num_wasted_slots),
            num_swapped=num_swapped,
            num_used_cpu_blocks=scheduler.host.num_used_blocks,
            counts=self._observer.counts,
        )

    async def view(self) -> EngineView:
        """See `EngineBackend.view`. A worker thread waits and counts blocks; the engine waits for the glimpse."""

        def look(engine: Engine) -> GlimpseState:
            return glimpse(engine.scheduler, self._observer.counts, engine.loop.clock())

        return await asyncio.to_thread(lambda: self._served.between_steps(look).view())


def parts_of(policy: Policy) -> tuple[tuple[str, str], ...]:
    """The policy's parts and settings, by their names or their classes' names."""
    parts = [(kind, getattr(policy, kind)) for kind in PARTS]
    named = [(kind, part if isinstance(part, str) else type(part).__name__) for kind, part in parts]
    caching = "on" if policy.enable_prefix_caching else "off"
    return (*named, ("prefix cache", caching), ("watermark", f"{policy.watermark:g}"))
