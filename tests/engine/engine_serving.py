"""An `AsyncEngine` around a tiny model for tests, and what they share."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from engine_models import assert_nothing_held, engine_of, greedy

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import Delta
from pagedserve.policy import Limits, Policy

ENDLESS = greedy(90)


@contextmanager
def serving(
    spec: str | Policy = "vllm_v1", limits: Limits | None = None, depth: int = 0
) -> Iterator[AsyncEngine]:
    """An async engine; after it is closed, nothing may be left of any request."""
    with engine_of(spec, limits, depth=depth) as engine:
        with AsyncEngine(engine) as served:
            yield served
        assert not served._thread.is_alive()
        assert not served._streams
        if served._error is None:
            assert_nothing_held(engine)


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def quiet(engine: Engine) -> None:
    """Until the engine has nothing left to do."""
    while engine.has_work:
        await asyncio.sleep(0.001)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, but a test that hangs fails."""
    return asyncio.run(asyncio.wait_for(main, 60))


async def leave_by_closing(stream: AsyncGenerator[Delta, None]) -> None:
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            if delta.token_ids:
                break
