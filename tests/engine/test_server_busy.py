"""A busy server: the event loop stays free, times are the engine's own, and browsers' pages stay out."""

import asyncio
from typing import Any

import pytest
from engine_serving import run
from server_apps import Running, running

from pagedserve.engine.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
TOO_LONG = {"prompt": "hello wo" * 32_768, "max_tokens": 1}
"""262,144 tokens of the byte tokenizer."""


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_health_answers_while_a_huge_prompt_is_tokenised(path: str) -> None:
    """CASES A9."""

    async def main(served: Running) -> None:
        body = TOO_LONG if path == COMPLETIONS else {"prompt": TOO_LONG["prompt"]}
        # As with a vocabulary that has a token so long: the text might fit, so it has to be tokenised.
        served.front.codec._longest_piece = 1 << 20
        huge = asyncio.create_task(served.ask(path, body))
        await served.until(lambda: served.front.admission.num_reqs)
        num_answers = 0
        async with served.client() as http:
            while not huge.done():
                assert (await http.get("/health")).status_code == 200
                num_answers += 1
                await asyncio.sleep(0)
        assert num_answers > 3, "the event loop did not run while the prompt was tokenised"
        answer = await huge
        if path == COMPLETIONS:
            assert answer.status_code == 400
            assert "262144" in answer.json()["error"]["message"].replace(",", "")
        else:
            assert answer.json()["count"] == 262_144
        await served.at_rest()

    with running() as served:
        run(main(served))


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_those_of_tokens_however_slowly_they_are_read(chat: bool) -> None:
    """CASES H1: the gaps measured are those between the commits of steps, of every token but the first."""

    async def main(served: Running) -> None:
        asked: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "stream": True, "n": 2}
        asked |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        talk = served.talk("/v1/chat/completions" if chat else COMPLETIONS, asked)
        await served.until(lambda: talk.text)
        talk.stop_taking()
        await served.until(lambda: not served.engine.has_work)
        counts = served.front.backend.stats().counts
        before = (
            counts.itl.count,
            counts.itl.total,
            served.front.counts.ttft.count,
            served.front.counts.ttft.total,
        )
        assert before[0] == 2 * 29
        assert before[2] == 1
        await asyncio.sleep(0.05)
        talk._takes.set()
        await talk.task
        ttft = served.front.counts.ttft
        assert (counts.itl.count, counts.itl.total, ttft.count, ttft.total) == before
        record = await served.served.record()
        times = record.steps["commit_ns"].to_pylist()
        span_s = (times[-1] - times[0]) / 1e9
        assert counts.itl.total <= 2 * span_s * 1.0001
        await served.at_rest()

    with running() as served:
        run(main(served))


def test_pages_of_allowed_origins_may_ask_and_no_others() -> None:
    async def main(served: Running) -> None:
        wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, is_allowed in (("http://localhost:3000", True), ("http://elsewhere", False)):
            async with served.client(Origin=origin) as http:
                asked = await http.options(COMPLETIONS, headers=wish)
                answered = await http.get("/v1/models")
            assert (asked.status_code == 200) == is_allowed
            for response in (asked, answered):
                allowed = response.headers.get("access-control-allow-origin")
                assert allowed == (origin if is_allowed else None)
                assert "access-control-allow-credentials" not in response.headers

    with running(allowed_origins=("http://localhost:3000",)) as served:
        run(main(served))


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "", "http://"])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValueError, match="give a scheme and a host"):
        ServerSettings(("m",), allowed_origins=(origin,))
    ServerSettings(("m",), allowed_origins=("*", "https://chat.example.org"))
