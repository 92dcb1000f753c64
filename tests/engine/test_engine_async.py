"""The asyncio side: streams, leaving them, closing, an engine that fails, an engine with nothing to do."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from engine_models import (
    assert_nothing_held,
    engine_of,
    greedy,
    hf_greedy,
    ids_of,
    prompts,
    small_limits,
    vocabulary,
)

from pagedserve.engine.async_engine import AsyncEngine, EngineDead
from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import Delta
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import Limits, Policy, RequestRefused, Step
from pagedserve.policy.batching import Mixed

DEPTHS = (0, 1)
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


@pytest.mark.parametrize("depth", DEPTHS)
def test_streams_bring_every_token_once_and_in_order(depth: int) -> None:
    """Many at a time; each stream is its request's tokens, and ends with the reason."""
    texts = prompts(9, 61)

    async def main(served: AsyncEngine) -> list[list[Delta]]:
        return await asyncio.gather(*(collect(served.stream(text, greedy(10))) for text in texts))

    with serving(depth=depth) as served:
        streams = run(main(served))
    for text, deltas in zip(texts, streams, strict=True):
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tuple(tokens) == hf_greedy("llama", text, 10)
        assert [delta.finish_reason for delta in deltas] == [None] * 10 + ["length"]


def test_a_stream_of_several_samples() -> None:
    """n = 3: one stream, deltas told apart by their index, three endings."""

    async def main(served: AsyncEngine) -> list[Delta]:
        return await collect(
            served.stream([1, 2, 3], SamplingParams(n=3, max_tokens=7, seed=1, ignore_eos=True))
        )

    with serving() as served:
        deltas = run(main(served))
    for index in range(3):
        own = [delta for delta in deltas if delta.index == index]
        assert sum(len(delta.token_ids) for delta in own) == 7
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]


def test_what_is_refused_raises_in_the_stream() -> None:
    """A prompt that can never run, and an option that no request can have; the engine goes on."""

    async def main(served: AsyncEngine) -> None:
        with pytest.raises(RequestRefused, match="96 prompt tokens; max_model_len is 96"):
            await collect(served.stream(range(96), greedy(1)))
        with pytest.raises(ValueError, match=r"prompt\[0\] is 999"):
            await collect(served.stream([999], greedy(1)))
        assert len(await collect(served.stream([1], greedy(2)))) == 3

    with serving() as served:
        run(main(served))


def test_a_full_queue_is_told_in_the_stream() -> None:
    """Refused by the scheduler, not at intake: the stream ends with the error."""

    async def main(served: AsyncEngine) -> list[Delta]:
        limits_filled = SamplingParams(n=4, max_tokens=1)
        return await collect(served.stream([1, 2], limits_filled))

    with serving(limits=small_limits(max_num_queued_reqs=2)) as served:
        deltas = run(main(served))
    errors = [delta for delta in deltas if delta.finish_reason == "error"]
    assert errors
    assert all(
        str(delta.error).startswith("2 requests wait and max_num_queued_reqs is 2") for delta in errors
    )


async def leave_by_closing(stream: AsyncIterator[Delta]) -> None:
    async with aclosing(stream) as deltas:  # pyright: ignore
        async for delta in deltas:
            if delta.token_ids:
                break


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
        while served.engine._next_id < 2:
            await asyncio.sleep(0.001)
        await quiet(served.engine)
        assert served.engine.record().requests.column("finish_reason").to_pylist() == ["length", "abort"]

    with serving() as served:
        served.engine.vocabulary = replace(vocabulary(), encode=encode)
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


@pytest.mark.parametrize("depth", DEPTHS)
def test_closing_ends_every_stream(depth: int) -> None:
    """Running, waiting or just sent: each stream ends with "abort"; later ones are told that it is closed."""

    async def main(served: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(served.stream([i, 2], ENDLESS))) for i in range(6)]
        while served.engine.num_live < 6:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(served.close)
        for deltas in await asyncio.gather(*tasks):
            assert deltas[-1].finish_reason == "abort"
        with pytest.raises(EngineDead, match="the engine has stopped: it was closed"):
            await collect(served.stream([1], greedy(1)))

    with serving(limits=small_limits(max_num_seqs=2), depth=depth) as served:
        run(main(served))
        served.close()


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_reaches_every_stream(depth: int) -> None:
    """The device fails in the middle: all streams raise `EngineDead` with the cause; so do later ones."""

    async def main(served: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(served.stream([i, 2], ENDLESS))) for i in range(5)]
        while not served.engine.scheduler.running:
            await asyncio.sleep(0.001)
        with mock.patch.object(served.engine.runner, "wait", side_effect=MemoryError("device is full")):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDead)
            assert "device is full" in str(result)
            assert isinstance(result.__cause__, MemoryError)
        assert len({id(result) for result in results}) == 5
        with pytest.raises(EngineDead, match="device is full"):
            await collect(served.stream([1], greedy(1)))

    with serving(limits=small_limits(max_num_seqs=2), depth=depth) as served:
        run(main(served))


def test_an_event_loop_that_is_gone_harms_nobody() -> None:
    """A caller whose loop ended without leaving its stream: its deltas go nowhere, the others go on."""

    async def desert(served: AsyncEngine) -> AsyncIterator[Delta]:
        stream = served.stream([9, 9], ENDLESS)
        await anext(stream)
        return stream

    async def main(served: AsyncEngine) -> None:
        assert len(await collect(served.stream([1, 2], greedy(9)))) == 10

    with serving() as served:
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(desert(served))
        loop.close()
        run(main(served))
        assert served._error is None
        (request,) = served.engine._live or [0]
        served.abort(request)
        del stream
        served._streams.clear()


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


def test_threads_may_submit_and_abort_while_it_runs() -> None:
    """Streams started, left and aborted from everywhere at once; every request ends once, nothing leaks."""

    async def client(served: AsyncEngine, number: int) -> None:
        text = prompts(24, 63)[number]
        async with aclosing(served.stream(text, greedy(12))) as deltas:  # pyright: ignore
            tokens: list[int] = []
            async for delta in deltas:
                tokens += delta.token_ids
                if number % 3 == 0 and len(tokens) > number % 7:
                    break
                if number % 3 == 1 and len(tokens) == 5:
                    await asyncio.to_thread(served.abort, delta.request)
        assert tuple(tokens) == hf_greedy("llama", text, 12)[: len(tokens)]
        assert number % 3 < 2 or len(tokens) == 12

    async def main(served: AsyncEngine) -> None:
        await asyncio.gather(*(client(served, number) for number in range(24)))
        await quiet(served.engine)

    with serving(limits=small_limits(num_blocks=30), depth=1) as served:
        run(main(served))
        assert served.engine.record().requests.num_rows == 24
