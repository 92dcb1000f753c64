"""How a request may end before its time: the client leaves, the server drains, the engine or a row fails."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from engine_models import small_limits
from engine_serving import run
from server_apps import Running, chunks_of, running

from pagedserve.engine import runner
from pagedserve.engine.sampling.sampler import sample

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "The moon is", "max_tokens": 60, "ignore_eos": True}
ENGINE_DEAD = (
    "the engine has stopped and the server is going down; send the request to another, or retry later"
)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@STREAMS
@DEPTHS
@pytest.mark.parametrize("steps", [0, 1, 2, 9], ids=["queued", "mid-prefill", "prefilled", "decoding"])
def test_leaving_stops_the_work_in_every_state(stream: bool, depth: int, steps: int) -> None:
    """CASES A6. The prompt takes three chunks, and there are two samples."""

    async def main(served: Running) -> None:
        served.gate.close()
        body = {**LONG, "prompt": "0123456789", "stream": stream, "n": 2}
        talk = served.talk(COMPLETIONS, body)
        await served.until(lambda: served.front.admission.num_tokens)
        served.gate.steps(steps)
        await served.until(lambda: served.front.backend.stats().counts.num_steps >= steps)
        talk.leave()
        await talk.task
        assert "[DONE]" not in talk.text
        assert talk.status in ((200, None) if stream else (None,))
        served.gate.open()
        await served.at_rest()
        assert served.front.counts.ended == {"abort": 1}
        assert served.front.backend.stats().counts.num_generated_tokens < 30, "it ran on"

    limits = small_limits(max_num_batched_tokens=4, max_num_seqs=4)
    with running(limits=limits, depth=depth) as served:
        run(main(served))


def test_leaving_while_the_prompt_is_tokenised() -> None:
    async def main(served: Running) -> None:
        def slowly(*_: object) -> list[int]:
            time.sleep(0.1)
            return [1]

        with mock.patch.object(served.front.codec, "encode", slowly):
            talk = served.talk(COMPLETIONS, LONG)
            await served.until(lambda: served.front.open)
            talk.leave()
            await talk.task
        assert talk.sent == []
        await served.at_rest()
        assert served.front.counts.num_accepted == 0

    with running() as served:
        run(main(served))


def test_a_queued_request_that_leaves_does_not_touch_the_running_one() -> None:
    """CASES A6, the second half."""

    async def main(served: Running) -> None:
        served.gate.close()
        runs = served.talk(COMPLETIONS, {**LONG, "stream": True})
        await served.until(lambda: served.front.admission.num_tokens)
        served.gate.steps(3)
        await served.until(lambda: runs.text)
        waits = served.talk(COMPLETIONS, {**LONG, "stream": True})
        await served.until(lambda: served.front.admission.num_tokens)
        waits.leave()
        await waits.task
        served.gate.open()
        await runs.task
        assert len(chunks_of(runs.text)) == 61
        assert waits.sent == []
        await served.at_rest()

    with running(limits=small_limits(max_num_seqs=1)) as served:
        run(main(served))


def test_a_reader_that_stops_reading_is_dropped_and_its_work_stops() -> None:
    async def main(served: Running) -> None:
        watcher = asyncio.create_task(served.front.watch_readers())
        served.gate.close()
        talk = served.talk(COMPLETIONS, {**LONG, "stream": True})
        await served.until(lambda: served.front.admission.num_tokens)
        served.gate.steps(3)
        await served.until(lambda: talk.text)
        talk.stop_taking()
        served.gate.steps(2)
        await talk.task
        assert "[DONE]" not in talk.text
        assert not any(message.get("more_body") is False for message in talk.sent), "it looks complete"
        served.gate.open()
        await served.at_rest()
        assert (await served.complete(**LONG))["usage"]["completion_tokens"] == 60
        watcher.cancel()

    with running(send_timeout_s=0.2) as served:
        run(main(served))


@STREAMS
@DEPTHS
def test_a_draining_server_refuses_what_is_new_and_finishes_what_runs(stream: bool, depth: int) -> None:
    """CASES A7."""

    async def main(served: Running) -> None:
        served.gate.close()
        talk = served.talk(COMPLETIONS, {**LONG, "stream": stream})
        await served.until(lambda: served.front.admission.num_tokens)
        draining = asyncio.create_task(served.front.drain(20))
        await served.until(lambda: served.front.closed_by is not None)
        async with served.client() as http:
            for refused in (await http.get("/health"), await http.post(COMPLETIONS, json=LONG)):
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "shutting_down"
                assert 1 <= int(refused.headers["retry-after"]) <= 20
            assert (await http.get("/metrics")).status_code == 200
        served.gate.open()
        await talk.task
        await draining
        assert talk.status == 200
        if stream:
            assert len(chunks_of(talk.text)) == 61
        await served.at_rest()

    with running(depth=depth) as served:
        run(main(served))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_at_the_deadline_streams_get_a_final_chunk_and_whole_answers_an_error(path: str) -> None:
    async def main(served: Running) -> None:
        served.gate.close()
        body: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "n": 2}
        body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed, whole = served.talk(path, {**body, **options}), served.talk(path, body)
        await served.until(lambda: served.front.backend.stats().num_waiting + len(served.engine._live) >= 4)
        served.gate.steps(3)
        await served.until(lambda: streamed.text)
        await served.front.drain(0.05)
        assert not served.front.open
        await asyncio.gather(streamed.task, whole.task)
        *chunks, usage = chunks_of(streamed.text)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == ["abort", "abort"]
        assert usage["usage"]["completion_tokens"] >= 2
        assert whole.status == 503
        assert '"code": "aborted"' in whole.text
        served.gate.open()
        await served.at_rest()

    with running() as served:
        run(main(served))


def test_a_request_that_fails_takes_nobody_down() -> None:
    """Its logits are not numbers: 500 and an error event for it, while the other runs on."""

    async def main(served: Running) -> None:
        def poisoned(logits: torch.Tensor, batch: Any) -> Any:
            for row, request in enumerate(batch.layout.requests):
                if served.engine.runner.table.sequences[request].params.seed == 13:
                    logits[row] = float("nan")
            return sample(logits, batch)

        with mock.patch.object(runner, "sample", poisoned):
            good = asyncio.create_task(served.ask(COMPLETIONS, LONG))
            bad = await served.ask(COMPLETIONS, {**LONG, "seed": 13})
            both = await served.ask(COMPLETIONS, {**LONG, "seed": 13, "stream": True, "prompt": ["a", "b"]})
        for answer in (bad, both):
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "output_failed"
        assert (await good).json()["usage"]["completion_tokens"] == 60
        await served.at_rest()
        assert served.front.counts.ended["error"] >= 2
        assert served.front.counts.ended.total() == 4
        assert (await served.ask(COMPLETIONS, LONG)).status_code == 200

    with running() as served:
        run(main(served))


def _fail_later(served: Running) -> Callable[[], bool]:
    step, count = served.engine.loop.step, iter(range(100))

    def failing() -> bool:
        if next(count) == 5:
            raise RuntimeError("[gloo/pair.cc:525] the device is gone")
        return step()

    return failing


def test_a_fault_of_the_engine_is_told_to_all_its_requests_and_the_server_is_unhealthy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one plain sentence; what libraries say of it stands in the log."""

    async def main(served: Running) -> None:
        served.gate.close()
        talks = [served.talk(COMPLETIONS, {**LONG, "stream": stream}) for stream in (True, False)]
        await served.until(lambda: len(served.engine._live) == 2)
        with mock.patch.object(served.engine.loop, "step", _fail_later(served)):
            served.gate.open()
            await asyncio.gather(*(talk.task for talk in talks))
        streamed, whole = talks
        assert streamed.status == 200
        assert whole.status == 500
        for error in (chunks_of(streamed.text)[-1]["error"], json.loads(whole.text)["error"]):
            assert (error["code"], error["message"]) == ("engine_dead", ENGINE_DEAD)
        async with served.client() as http:
            for answer in (await http.get("/health"), await http.post(COMPLETIONS, json=LONG)):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_dead"
                assert answer.json()["error"]["message"] == ENGINE_DEAD
            assert (await http.get("/metrics")).status_code == 200
        assert served.front.counts.ended == {"error": 2}

    with running() as served:
        run(main(served))
    assert "the engine has stopped" in caplog.text
    assert "RuntimeError: [gloo/pair.cc:525] the device is gone" in caplog.text
