"""Leaving a stream stops its work, and an engine with no work sleeps."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from engine_models import greedy, hf_greedy, ids_of, prompts, small_limits, vocabulary
from engine_serving import ENDLESS, collect, leave_by_closing, quiet, run, serving

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.outputs import Delta
from pagedserve.policy import Policy, Step
from pagedserve.policy.batching import Mixed

DEPTHS = (0, 1)


async def leave_by_break(stream: AsyncIterator[Delta]) -> None:
    async for delta in stream:
        if delta.token_ids:
            break
    del stream
    gc.collect()


async def leave_by_cancelling(stream: AsyncIterator[Delta]) -> None:
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_at_once(stream: AsyncIterator[Delta]) -> None:
    """While the prompt is still being taken in by a worker thread."""
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_break, leave_by_cancelling, leave_at_once])
def test_a1_leaving_the_iteration_aborts(
    leave: Callable[[AsyncIterator[Delta]], Coroutine[Any, Any, None]], depth: int
) -> None:
    """A1: nobody reads on, so nothing is computed on; waiting or running, and the others are unharmed."""
    text = prompts(1, 62)[0]

    async def main(served: AsyncEngine) -> None:
        other = asyncio.create_task(collect(served.stream(text, greedy(30))))
        for _ in range(4):
            await leave(served.stream([5, 6, 7], ENDLESS))
        tokens = [token for delta in await other for token in delta.token_ids]
        assert tuple(tokens) == hf_greedy("llama", text, 30)
        await quiet(served.engine)
        rows = served.engine.record().requests.to_pylist()
        assert {row["finish_reason"] for row in rows if row["num_prompt_tokens"] == 3} <= {"abort"}

    with serving(limits=small_limits(max_num_seqs=2), depth=depth) as served:
        run(main(served))


def test_a1_leaving_before_a_long_prompt_is_taken_in() -> None:
    """A1: cancelled while a worker thread tokenises; what it hands in afterwards is aborted, not served."""
    tokenising, go_on = threading.Event(), threading.Event()

    def encode(text: str) -> list[int]:
        tokenising.set()
        assert go_on.wait(30)
        return ids_of(text)

    async def main(served: AsyncEngine) -> None:
        slow = asyncio.create_task(collect(served.stream("slow", ENDLESS)))
        await asyncio.to_thread(tokenising.wait, 30)
        # A9: the others are served meanwhile.
        assert len(await collect(served.stream([1, 2], greedy(5)))) == 6
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        go_on.set()
        while served.engine.intake._next_id < 2:
            await asyncio.sleep(0.001)
        await quiet(served.engine)
        assert served.engine.record().requests.column("finish_reason").to_pylist() == ["length", "abort"]

    with serving() as served:
        served.engine.intake.vocabulary = replace(vocabulary(), encode=encode)
        run(main(served))


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_by_id_ends_the_stream(depth: int) -> None:
    """A1: another caller aborts; the stream ends with that reason, after the tokens that were told."""

    async def main(served: AsyncEngine) -> None:
        deltas: list[Delta] = []
        async for delta in served.stream([1, 2, 3], ENDLESS):
            deltas.append(delta)
            if len(deltas) == 3:
                served.abort(delta.request, "timeout")
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert deltas[-1].finish_reason == "timeout"
        assert tuple(tokens) == hf_greedy("llama", (1, 2, 3), 90)[: len(tokens)]
        assert len(tokens) < 90

    with serving(depth=depth) as served:
        run(main(served))


class CountedWaits:
    """Counts how often the engine's thread went to sleep."""

    def __init__(self, served: AsyncEngine) -> None:
        self.num_steps = self.num_waits = 0
        step, wait = served.engine.step, served._woken.wait

        def counted_step() -> bool:
            self.num_steps += 1
            return step()

        def counted_wait(timeout: float | None = None) -> bool:
            self.num_waits += 1
            return wait(timeout)

        served.engine.step = counted_step
        served._woken.wait = counted_wait


def test_an_idle_engine_sleeps() -> None:
    """Nothing to do, no wake-ups: neither before the first request, nor after the last, nor after an abort."""

    async def main(served: AsyncEngine) -> None:
        counted = CountedWaits(served)
        for _ in range(3):
            await collect(served.stream([1, 2], greedy(3)))
            await leave_by_closing(served.stream([1, 2], ENDLESS))
            await quiet(served.engine)
            await asyncio.sleep(0.02)
            before = (counted.num_steps, counted.num_waits)
            await asyncio.sleep(0.1)
            assert (counted.num_steps, counted.num_waits) == before
        assert counted.num_steps > 6

    with serving() as served:
        run(main(served))


class Patient:
    """Waits a while before it schedules anything."""

    def compose(self, step: Step) -> None:
        """Name the time; requests that are old enough are served."""
        waiting = step.next_waiting()
        if (
            waiting is not None
            and not step.num_running
            and step.now_ns < waiting.request.arrival_ns + 2 * 10**8
        ):
            step.wake_at(waiting.request.arrival_ns + 2 * 10**8)
        else:
            Mixed().compose(step)


def test_a_rule_that_waits_costs_nothing_meanwhile() -> None:
    """It named a time: the engine sleeps until then, and for ever once the request is gone."""

    async def main(served: AsyncEngine) -> None:
        counted = CountedWaits(served)
        task = asyncio.create_task(collect(served.stream([1, 2], greedy(3))))
        while not served.engine.loop.wake_ns:
            await asyncio.sleep(0.001)
        assert len(await task) == 4
        assert counted.num_steps < 12
        late = asyncio.create_task(collect(served.stream([1, 2], greedy(3))))
        while not served.engine.loop.wake_ns:
            await asyncio.sleep(0.001)
        late.cancel()
        await quiet(served.engine)
        await asyncio.sleep(0.3)
        before = (counted.num_steps, counted.num_waits)
        await asyncio.sleep(0.1)
        assert (counted.num_steps, counted.num_waits) == before

    with serving(Policy(batching=Patient())) as served:
        run(main(served))


class InPairs:
    """Serves requests two by two, and names no time while one waits alone."""

    def compose(self, step: Step) -> None:
        """Leave a single request waiting."""
        if step.num_running or len(list(step.waiting())) > 1:
            Mixed().compose(step)


def test_a_rule_that_leaves_requests_waiting_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the numbers; the stream goes on when another request changes the rule's mind."""

    async def main(served: AsyncEngine) -> None:
        for _ in range(2):
            first = asyncio.create_task(collect(served.stream([1, 2], greedy(3))))
            while not served.engine.num_stranded:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert not first.done()
            assert len(await collect(served.stream([3, 4], greedy(3)))) == len(await first) == 4

    with serving(Policy(batching=InPairs())) as served:
        run(main(served))
    (warning,) = caplog.messages
    assert warning.startswith("InPairs schedules nothing while 1 requests wait and nothing runs")
