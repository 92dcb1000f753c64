"""The asyncio side: streams, closing, an engine that fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from unittest import mock

import pytest
from engine_models import (
    greedy,
    hf_greedy,
    prompts,
    small_limits,
)
from engine_serving import ENDLESS, collect, quiet, run, serving

from pagedserve.engine.async_engine import AsyncEngine, EngineDead
from pagedserve.engine.outputs import Delta
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import RequestRefused

DEPTHS = (0, 1)


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


def test_threads_may_submit_and_abort_while_it_runs() -> None:
    """Streams started, left and aborted from everywhere at once; every request ends once, nothing leaks."""

    async def client(served: AsyncEngine, number: int) -> None:
        text = prompts(24, 63)[number]
        async with aclosing(served.stream(text, greedy(12))) as deltas:
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
