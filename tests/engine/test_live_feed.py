"""The live page's feed over HTTP: its shape, its bounds, its end, and nothing of any text."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from engine_models import small_limits
from engine_serving import run
from server_apps import MODEL, Running, Talk, running

from pagedserve.engine.server import live
from pagedserve.engine.server.engine_view import DECODE, FIRST_OWNED

COMPLETIONS, EVENTS = "/v1/completions", "/live/events"
BODY = {"prompt": "a secret prompt", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "user": "alice"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BUSY_S", 0.01)
    monkeypatch.setattr(live, "IDLE_S", 0.01)
    monkeypatch.setattr(live, "BEAT_S", 0.05)


def _listen(served: Running) -> Talk:
    return Talk(served.app, EVENTS, {}, method="GET")


def _events(talk: Talk) -> list[tuple[str, Any]]:
    """Names and data of the whole events so far; the last element of the split is what is under way."""
    events: list[tuple[str, Any]] = []
    for event in talk.text.split("\n\n")[:-1]:
        if event.startswith(":"):
            events.append(("beat", None))
            continue
        name, data = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def _frames(talk: Talk) -> list[dict[str, Any]]:
    return [data for name, data in _events(talk) if name == "frame"]


def _pool(frames: list[dict[str, Any]]) -> np.ndarray:
    """The pool as a page has it after these frames."""
    codes: np.ndarray | None = None
    for frame in frames:
        blocks = frame["blocks"]
        if "all" in blocks:
            pairs = np.array(blocks["all"]).reshape(-1, 2)
            codes = np.repeat(pairs[:, 0], pairs[:, 1])
        assert codes is not None, "the first frame has the whole pool"
        for first, length, code in np.array(blocks.get("changed", ())).reshape(-1, 3):
            codes[first : first + length] = code
    assert codes is not None
    return codes


async def _leave(talk: Talk) -> None:
    talk.leave()
    await talk.task


def test_events_tell_the_facts_then_frames_from_which_the_pool_is_rebuilt() -> None:
    async def main(served: Running) -> None:
        talk = _listen(served)
        await served.until(lambda: _frames(talk))
        served.gate.close()
        requests = [served.talk(COMPLETIONS, {**BODY, "n": 2}) for _ in "ab"]
        for num_tokens in (4, 40):
            served.gate.steps(num_tokens)
            await served.until(
                lambda wanted=num_tokens: served.front.backend.stats().counts.num_generated_tokens >= wanted
            )
        served.gate.open()
        await asyncio.gather(*(each.task for each in requests))
        await served.at_rest()
        num_frames = len(_frames(talk))
        await served.until(lambda: len(_frames(talk)) > num_frames + 1)
        view, frames = await served.front.backend.view(), _frames(talk)
        assert (_pool(frames) == view.blocks).all()
        name, hello = _events(talk)[0]
        assert name == "hello"
        assert (hello["model"], hello["policy"], hello["num_blocks"]) == (MODEL, "vllm_v1", 64)
        assert ["allocator", "paged"] in hello["parts"]
        for index, frame in enumerate(frames):
            codes = _pool(frames[: index + 1])
            owned = int((codes >= FIRST_OWNED).sum())
            assert frame["pool"][0] == owned
            assert sum(frame["pool"]) - frame["pool"][1] == len(codes)
            assert frame["state"] == "serving"
        busiest = max(frames, key=lambda frame: len(frame["running"]))
        assert len(busiest["running"]) == busiest["point"]["running"] == 4
        assert [row[2] for row in busiest["running"]] == ["alice"] * 4
        assert {row[1] for frame in frames for row in frame["running"]} >= {DECODE}
        last = frames[-1]
        assert (last["running"], last["waiting"], last["ended"]) == ([], [], {"length": 2})
        assert last["totals"]["output_tokens"] == 240
        assert last["point"]["ttft"][0] > 0
        await _leave(talk)

    with running() as served:
        run(main(served))


def test_no_text_and_no_token_is_ever_told() -> None:
    async def main(served: Running) -> None:
        talk = _listen(served)
        answers = await asyncio.gather(*(served.complete(**BODY, n=2) for _ in range(3)))
        await served.until(lambda: len(_frames(talk)) > 3)
        texts = [choice["text"] for answer in answers for choice in answer["choices"]]
        assert all(texts)
        words = ["secret", "prompt is", *(text[:8] for text in texts)]
        assert not [word for word in words if json.dumps(word)[1:-1] in talk.text]
        ids = ",".join(str(byte) for byte in b"a secret prompt")
        assert ids[:12] not in talk.text
        await _leave(talk)

    with running() as served:
        run(main(served))


def test_nobody_looks_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(served: Running) -> None:
        looks, view = [], served.front.backend.view

        async def counted() -> Any:
            looks.append(1)
            return await view()

        monkeypatch.setattr(served.front.backend, "view", counted)
        await served.complete(**BODY)
        assert not looks
        one, two = _listen(served), _listen(served)
        await served.until(lambda: len(_frames(one)) > 4 and len(_frames(two)) > 4)
        assert len(looks) <= max(len(_frames(one)), len(_frames(two))) + 2, "one look is for all"
        await _leave(one)
        await _leave(two)
        feed = served.app.state.live
        assert (feed.num_listeners, feed._frame, feed._ticker) == (0, None, None)
        num_looks = len(looks)
        await served.complete(**BODY)
        assert len(looks) <= num_looks + 1, "the one that was under way"
        again = _listen(served)
        await served.until(lambda: _frames(again))
        assert "all" in _frames(again)[0]["blocks"]
        assert _events(again)[0][1]["points"], "what was seen before is told"
        await _leave(again)

    with running() as served:
        run(main(served))


def test_listeners_are_bounded() -> None:
    async def main(served: Running) -> None:
        talks = [_listen(served) for _ in range(live.MAX_LISTENERS)]
        await served.until(lambda: all(_frames(talk) for talk in talks))
        async with served.client() as http:
            refused = await http.get(EVENTS)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_listeners"
        assert refused.headers["retry-after"] == "10"
        await _leave(talks.pop())
        talks.append(_listen(served))
        await served.until(lambda: _frames(talks[-1]))
        for talk in talks:
            await _leave(talk)
        assert served.app.state.live.num_listeners == 0

    with running() as served:
        run(main(served))


def test_a_slow_listener_misses_frames_and_then_gets_the_whole_pool() -> None:
    async def main(served: Running) -> None:
        slow, quick = _listen(served), _listen(served)
        await served.until(lambda: _frames(slow) and _frames(quick))
        slow.stop_taking()
        num_slow = len(_frames(slow))
        await served.complete(**BODY, n=4)
        await served.until(lambda: len(_frames(quick)) > num_slow + 20)
        assert len(_frames(slow)) == num_slow
        slow._takes.set()
        await served.until(lambda: len(_frames(slow)) > num_slow + 3)
        told = ["all" in frame["blocks"] for frame in _frames(slow)[num_slow:]]
        assert any(told), "what it missed is not told bit by bit"
        assert len(_frames(slow)) < len(_frames(quick)) - 10
        view = await served.front.backend.view()
        assert (_pool(_frames(slow)) == view.blocks).all()
        await _leave(slow)
        await _leave(quick)

    with running() as served:
        run(main(served))


def test_a_listener_that_takes_nothing_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def main(served: Running) -> None:
        talk = _listen(served)
        await served.until(lambda: _frames(talk))
        talk.stop_taking()
        await talk.task
        assert served.app.state.live.num_listeners == 0

    with running(send_timeout_s=0.2) as served:
        run(main(served))
    assert "took nothing for 0.2 s" in caplog.text


def test_a_long_step_is_bridged_by_beats() -> None:
    async def main(served: Running) -> None:
        talk = _listen(served)
        await served.until(lambda: _frames(talk))
        served.gate.close()
        request = served.talk(COMPLETIONS, BODY)
        await served.until(lambda: [name for name, _ in _events(talk)][-2:] == ["beat", "beat"])
        served.gate.open()
        await request.task
        num_frames = len(_frames(talk))
        await served.until(lambda: len(_frames(talk)) > num_frames)
        await _leave(talk)

    with running() as served:
        run(main(served))


def test_listeners_hear_of_the_drain_and_end_with_it() -> None:
    async def main(served: Running) -> None:
        talk = _listen(served)
        await served.until(lambda: _frames(talk))
        served.gate.close()
        request = served.talk(COMPLETIONS, BODY)
        await served.until(lambda: served.front.counts.num_open)
        draining = asyncio.create_task(served.front.drain(30))
        while _frames(talk)[-1]["state"] != "shutting_down":
            served.gate.steps(1)  # a look has its turn between two steps
            await asyncio.sleep(0.005)
        served.gate.open()
        await request.task
        await draining
        served.app.state.live.close()
        await talk.task
        assert talk.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        async with served.client() as http:
            refused = await http.get(EVENTS)
        assert refused.json()["error"]["code"] == "shutting_down"

    with running() as served:
        run(main(served))


def test_a_look_that_fails_ends_the_streams_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def main(served: Running) -> None:
        async def failing() -> Any:
            raise RuntimeError("no look")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.front.backend, "view", failing)
            talks = [_listen(served) for _ in "ab"]
            await asyncio.gather(*(talk.task for talk in talks))
            assert served.app.state.live.num_listeners == 0
        assert (await served.complete(**BODY))["usage"]["completion_tokens"] == 60
        again = _listen(served)
        await served.until(lambda: _frames(again))
        await _leave(again)

    with running() as served:
        run(main(served))
    assert "look at the engine failed" in caplog.text


def test_a_pool_at_rest_is_told_in_few_numbers() -> None:
    async def main(served: Running) -> None:
        talk = _listen(served)
        await served.until(lambda: len(_frames(talk)) > 1)
        assert _frames(talk)[0]["blocks"] == {"all": [0, 5000]}
        assert _frames(talk)[1]["blocks"] == {"changed": []}
        await _leave(talk)

    with running(limits=small_limits(num_blocks=5000)) as served:
        run(main(served))
