"""An engine that lives long keeps no more than it must, and one that has stopped says so."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from engine_models import drain, engine_of, greedy, prompts, small_limits, tiny_model, vocabulary
from engine_serving import ENDLESS, collect, run, serving

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.engine import Engine, EngineDead
from pagedserve.engine.heap import settle_heap
from pagedserve.metrics.tokens import token_times
from pagedserve.policy import policy

DEPTHS = (0, 1)


@contextmanager
def engine_keeping(record: bool) -> Iterator[Engine]:
    limits = small_limits(max_num_queued_reqs=6)
    engine = Engine(tiny_model(), vocabulary(), policy("vllm_v1"), limits, seed=0, record=record)
    yield engine
    engine.close()


def objects_left_by(engine: Engine, num_rounds: int) -> int:
    """How many more objects there are after so many rounds of outputs, refusals and aborts, a few of them unlike."""

    def work(number: int) -> None:
        texts = prompts(9, 100 + number % 4)
        states = [engine.submit(text, greedy(4))[0] for text in texts]
        engine.abort(states[0].sequence.request.id)
        drain(engine)
        assert {state.finish_reason for state in states} == {"abort", "length", "error"}

    for number in range(8):
        work(number)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(num_rounds):
        work(number)
    gc.collect()
    return len(gc.get_objects()) - before


def test_without_a_record_memory_stays_bounded() -> None:
    """With one, every step and request leaves something behind; without, nothing does, and that is said."""
    with engine_keeping(record=True) as engine:
        assert objects_left_by(engine, 12) > 500
        assert engine.record().requests.num_rows == 9 * 20
    with engine_keeping(record=False) as engine:
        assert objects_left_by(engine, 12) < 50
        with pytest.raises(RuntimeError, match="keeps no record: it was made with record=False"):
            engine.record()


def test_refused_requests_leave_only_their_rows() -> None:
    """Their prefix keys go with them, as those of ended ones do."""
    with engine_keeping(record=True) as engine:
        for text in prompts(12, 101):
            engine.submit(text, greedy(2))
        drain(engine)
        rows = engine.record().requests.to_pylist()
        assert engine._recorder is not None
        assert not engine._recorder._prefix_keys
    refused = [row for row in rows if row["finish_reason"] == "refused"]
    assert len(refused) == 6
    assert [len(row["prefix_keys"]) for row in refused] == [row["num_prompt_tokens"] // 4 for row in refused]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_closed_engine_is_gone_with_its_last_reference(depth: int) -> None:
    """Its KV cache may be most of the memory, and the next engine's size goes by what is free."""
    engine = Engine(tiny_model(), vocabulary(), policy("vllm_v1"), small_limits(), overlap_depth=depth)
    engine.submit([1, 2], greedy(3))
    drain(engine)
    cache = weakref.ref(engine.runner.kv.data)
    engine.close()
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_closed_engine_says_so(depth: int) -> None:
    """Nothing can be handed in or computed; what was recorded can still be had."""
    with engine_of("vllm_v1", depth=depth) as engine:
        engine.submit([1, 2], greedy(3))
        drain(engine)
        engine.close()
        engine.close()
        for call in (engine.step, lambda: engine.submit([1], greedy(1))):
            with pytest.raises(EngineDead, match="the engine has stopped: it was closed; make a new one"):
                call()
        assert engine.record().requests.column("num_output_tokens").to_pylist() == [3]
        assert not engine.has_work


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_engine_whose_step_failed_says_so(depth: int) -> None:
    """Policy and device no longer agree, so it must not go on; the cause is told with every call."""
    with engine_of("vllm_v1", depth=depth) as engine:
        engine.submit([1, 2], greedy(3))
        with (
            mock.patch.object(engine.runner, "wait", side_effect=MemoryError("device is full")),
            pytest.raises(MemoryError),
        ):
            drain(engine)
        for call in (engine.step, lambda: engine.submit([1], greedy(1))):
            with pytest.raises(EngineDead, match="device is full; make a new one") as told:
                call()
            assert isinstance(told.value.__cause__, MemoryError)
        assert engine.record().requests.column("finish_reason").to_pylist() == ["unfinished"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_record_is_taken_between_two_steps(depth: int) -> None:
    """Asked for again and again while requests run: no step goes on meanwhile, and each record is whole."""
    in_step = False

    async def main(served: AsyncEngine) -> None:
        streams = [asyncio.create_task(collect(served.stream([i, 2], ENDLESS))) for i in range(6)]
        num_partial = 0
        while not all(stream.done() for stream in streams):
            record = await served.record({"name": "so far"})
            reasons = record.requests.column("finish_reason").to_pylist()
            assert (
                token_times(record).counts.tolist() == record.array("requests", "num_output_tokens").tolist()
            )
            num_partial += "unfinished" in reasons
        assert num_partial > 1

    with serving(limits=small_limits(max_num_seqs=4), depth=depth) as served:
        step, take = served.engine.loop.step, served.engine._recorder.record  # pyright: ignore

        def watched_step() -> bool:
            nonlocal in_step
            in_step = True
            moved = step()
            in_step = False
            return moved

        def watched_take(header: dict[str, object]) -> object:
            assert not in_step
            time.sleep(0.005)
            assert not in_step
            return take(header)

        served.engine.loop.step = watched_step
        served.engine._recorder.record = watched_take  # pyright: ignore
        run(main(served))
        served.engine._recorder.record = take  # pyright: ignore


def test_a_settled_heap_is_out_of_the_collectors_sight() -> None:
    """What lives is frozen, what is garbage is not kept, and what comes later is collected as ever."""

    class Node:
        """One that can hold itself."""

        def __init__(self) -> None:
            self.own = self

    before = gc.get_freeze_count()
    try:
        garbage = weakref.ref(Node())
        settle_heap()
        assert garbage() is None
        assert gc.get_freeze_count() > before + 10_000
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
