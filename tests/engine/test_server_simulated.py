"""The server over the engine in wall time: the same HTTP, the same metrics; what needs a model is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_models import small_limits, vocabulary
from engine_serving import run
from server_apps import MODEL, Running, hf_tokenizer, running, texts_of

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.server.app import make_app
from pagedserve.engine.server.backend import ThreadBackend
from pagedserve.engine.server.settings import ServerSettings
from pagedserve.policy import policy
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.wall_time import WallTimeState
from pagedserve.traces.lengths import Fixed, LengthDist
from pagedserve.validation.wall_time_engine import WallTimeModel, wall_time_engine

MS = 1_000_000
HOUR_NS = 3_600 * 10**9


@contextmanager
def simulating(step_ns: int = MS, lengths: LengthDist | None = None, depth: int = 0) -> Iterator[Running]:
    """A server whose steps take ``step_ns``."""
    model = WallTimeModel(WallTimeState(ConstantCost(step_ns)), 256, lengths)
    engine = wall_time_engine(
        model, vocabulary(), policy("vllm_v1"), small_limits(), overlap_depth=depth, seed=0
    )
    with AsyncEngine(engine) as served:
        app = make_app(ThreadBackend(served, "vllm_v1"), hf_tokenizer(), ServerSettings((MODEL,)))
        made = Running(app, served)
        try:
            yield made
        finally:
            made.gate.open()
            made.front.codec.close()


Check = Callable[[Running], Coroutine[Any, Any, None]]


def with_server(check: Check, **options: Any) -> None:
    """Run a check, after which nothing may be left."""

    async def main(server: Running) -> None:
        await check(server)
        await server.at_rest()

    with simulating(**options) as server:
        run(main(server))


@pytest.mark.parametrize("depth", [0, 1])
def test_whole_and_streamed_answers_agree_and_count_right(depth: int) -> None:
    async def check(server: Running) -> None:
        body = {"prompt": ["one", "two"], "max_tokens": 12, "n": 2, "seed": 4, "temperature": 0.8}
        whole = await server.complete(**body)
        chunks = await server.stream(**body, stream_options={"include_usage": True})
        texts = [choice["text"] for choice in whole["choices"]]
        assert texts == texts_of(chunks, 4)
        assert len(set(texts)) > 1
        assert all(len(text) == 12 and text.isprintable() for text in texts)
        assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 48
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}

    with_server(check, depth=depth)


def test_chat_stops_and_drawn_lengths() -> None:
    async def check(server: Running) -> None:
        message = [{"role": "user", "content": "Hello"}]
        asked = {"messages": message, "temperature": 0}
        answer = (await server.ask("/v1/chat/completions", {**asked, "max_tokens": 50})).json()
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 9)
        text = choice["message"]["content"]
        assert len(text) == 8  # EOS has no text
        stopped = (await server.ask("/v1/chat/completions", {**asked, "stop": text[3:5]})).json()
        assert stopped["choices"][0]["message"]["content"] == text[:3]
        ignoring = await server.complete(prompt="x", max_tokens=30)
        assert ignoring["usage"]["completion_tokens"] == 30

    with_server(check, lengths=Fixed(9))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 2),
        ("prompt_logprobs", 1),
        ("logit_bias", {"5": 10}),
        ("frequency_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "[ab]+"),
    ],
)
def test_what_filler_cannot_follow_is_refused_by_name(field: str, value: Any) -> None:
    async def check(server: Running) -> None:
        for stream in (False, True)[: 1 if field == "prompt_logprobs" else 2]:  # no stream tells those
            body = {"prompt": "x", "max_tokens": 3, field: value, "stream": stream}
            response = await server.ask("/v1/completions", body)
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert "the simulated engine makes filler tokens" in message
            assert field.partition("_")[0] in message

    with_server(check)


def test_a_closed_connection_frees_everything() -> None:
    async def check(server: Running) -> None:
        talk = server.talk("/v1/completions", {"prompt": "x", "max_tokens": 90, "stream": True})
        await server.until(lambda: len(talk.sent) > 3)
        talk.leave()
        await talk.task
        await server.until(lambda: not server.engine.num_live)
        assert server.front.backend.stats().counts.finished.total() == 1

    with_server(check, step_ns=5 * MS)


def test_closing_does_not_wait_for_a_step_of_an_hour() -> None:
    async def check(server: Running) -> None:
        talk = server.talk("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True})
        await server.until(lambda: server.engine.scheduler.running)
        closing = threading.Thread(target=server.served.close)
        closing.start()
        await asyncio.to_thread(closing.join, 30)
        assert not closing.is_alive()
        talk.task.cancel()
        assert server.engine.runner.facts.counters["num_cut_steps"] == 1

    with simulating(step_ns=HOUR_NS) as server:
        run(check(server))


def test_its_metrics_have_the_live_engines_names() -> None:
    async def names(server: Running) -> set[str]:
        await server.complete(prompt="Once", max_tokens=4)
        async with server.client() as http:
            text = (await http.get("/metrics")).text
        return {line.partition(" ")[0].partition("{")[0] for line in text.splitlines() if line[:1] != "#"}

    with simulating() as simulated, running() as live:
        ours, theirs = run(names(simulated)), run(names(live))
    assert ours == theirs
    assert "vllm:time_to_first_token_seconds_bucket" in ours
