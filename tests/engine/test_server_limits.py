"""The queue's bounds, sizes, times and keys: what is too much is turned away with a number and advice."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_serving import run
from server_apps import Running, chunks_of, run_served, running

from pagedserve.engine.server.settings import ApiKeys, ServerSettings

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}


def _error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_full_queue_answers_503_until_a_first_token_comes() -> None:
    """Bounded by sequences: what waits or computes its prompt counts, what streams does not."""

    async def main(served: Running) -> None:
        served.gate.close()
        first = asyncio.create_task(served.ask(COMPLETIONS, {**BODY, "n": 2}))
        await served.until(lambda: served.front.admission.num_tokens)
        for stream in (False, True):
            refused = await served.ask(COMPLETIONS, {**BODY, "n": 2, "stream": stream})
            error = _error(refused, 503)
            assert error["message"] == "2 requests are queued and max_num_queued_reqs is 3; retry later"
            assert (error["code"], refused.headers["retry-after"]) == ("queue_full", "1")
        third = asyncio.create_task(served.ask(COMPLETIONS, BODY))
        served.gate.open()
        assert [(await task).status_code for task in (first, third)] == [200, 200]
        assert (await served.ask(COMPLETIONS, {**BODY, "n": 3})).status_code == 200
        assert (served.front.admission.num_reqs, served.front.admission.num_tokens) == (0, 0)
        assert served.front.admission.rejections == {"queue_full_reqs": 2}

    with running(max_num_queued_reqs=3) as served:
        run(main(served))


def test_a_queue_full_of_tokens_lets_one_large_prompt_in_when_it_is_empty() -> None:
    async def main(served: Running) -> None:
        served.gate.close()
        large = {**BODY, "prompt": "a prompt larger than the bound"}
        first = asyncio.create_task(served.ask(COMPLETIONS, large))
        await served.until(lambda: served.front.admission.num_tokens)
        error = _error(await served.ask(COMPLETIONS, BODY), 503)
        assert (
            "30 prompt tokens are queued, this request has 1 and max_num_queued_tokens is 10"
            in error["message"]
        )
        served.gate.open()
        assert (await first).status_code == 200
        assert (await served.ask(COMPLETIONS, BODY)).status_code == 200

    with running(max_num_queued_tokens=10) as served:
        run(main(served))


def test_places_in_the_queue_come_back_after_the_first_token() -> None:
    async def main(served: Running) -> None:
        served.gate.close()
        talk = served.talk(COMPLETIONS, {**BODY, "max_tokens": 50, "stream": True})
        await served.until(lambda: served.front.admission.num_tokens)
        served.gate.steps(2)
        await served.until(lambda: talk.text)
        assert (served.front.admission.num_reqs, served.front.admission.num_tokens) == (0, 0)
        served.gate.open()
        await talk.task

    with running() as served:
        run(main(served))


async def _in_pieces(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 100):
        yield b" " * 100


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not() -> None:
    async def main(served: Running) -> None:
        async with served.client() as http:
            headers = {"Content-Type": "application/json"}
            fits = json.dumps(BODY).encode().ljust(1000)
            assert (await http.post(COMPLETIONS, content=fits, headers=headers)).status_code == 200
            for content in (fits + b" ", _in_pieces(1100)):
                refused = await http.post(COMPLETIONS, content=content, headers=headers)
                error = _error(refused, 413)
                assert "this server takes 1,000: send less at once" in error["message"]
                assert refused.headers["connection"] == "close"

    with running(max_body_bytes=1000) as served:
        run(main(served))


def test_a_request_that_takes_too_long_is_ended() -> None:
    """Before its first token with 504; in a stream with an error event. Its work stops, others go on."""

    async def main(served: Running) -> None:
        served.gate.close()
        whole = await served.ask(COMPLETIONS, BODY)
        assert _error(whole, 504)["code"] == "timeout"
        assert "did not end within 0.3 s" in _error(whole, 504)["message"]
        talk = served.talk(COMPLETIONS, {**BODY, "max_tokens": 50, "stream": True})
        await served.until(lambda: served.front.admission.num_tokens)
        served.gate.steps(3)
        await talk.task
        assert talk.status == 200
        *chunks, last = chunks_of(talk.text)
        assert chunks
        assert last["error"]["code"] == "timeout"
        served.gate.open()
        await served.at_rest()
        assert served.front.counts.ended == {"timeout": 2}
        assert served.front.backend.stats().counts.finished == {"timeout": 2}
        reasons = (await served.served.record()).requests.column("finish_reason").to_pylist()
        assert reasons == ["timeout", "timeout"], "the first of them had no token"

    with running(request_timeout_s=0.3) as served:
        run(main(served))


def test_a_key_opens_everything_and_nothing_but_health_opens_without() -> None:
    async def main(served: Running) -> None:
        paths = ("/metrics", "/v1/models", "/version", "/openapi.json", "/nothing", COMPLETIONS)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic two"}):
            async with served.client(**headers) as http:
                assert (await http.get("/health")).status_code == 200
                for path in paths:
                    refused = await http.get(path)
                    assert _error(refused, 401)["code"] == "invalid_api_key"
                    assert refused.headers["www-authenticate"].startswith("Bearer")
                assert (await http.post(COMPLETIONS, content=b"x" * 10**6)).status_code == 401
        for key in ("one", "two", "käse"):
            async with served.client() as http:
                bearer = f"Bearer {key}".encode()
                models = await http.get("/v1/models", headers=[(b"authorization", bearer)])
                assert models.status_code == 200
        assert served.front.counts.num_accepted == 0

    with running(api_keys=ApiKeys(["one", "two", "käse"])) as served:
        run(main(served))


def test_keys_come_from_a_file_and_a_variable_and_never_show(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n  spaced  \n", encoding="utf-8")
    keys = ApiKeys.read(file, "a, b,")
    assert len(keys) == 4
    assert all(keys.opens(key) for key in (b"from-file", b"spaced", b"a", b"b"))
    assert not any(keys.opens(key) for key in (b"", b"# ours", b"from-fil", b"from-file "))
    for text in (repr(keys), repr(ServerSettings(("m",), keys))):
        assert "from-file" not in text
        assert "spaced" not in text
    file.write_text("# none\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no key in it; write one a line"):
        ApiKeys.read(file, "")
    assert not ApiKeys.read(None, "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_names": ()}, "model_names has no name"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs is 0"),
        ({"max_num_queued_tokens": 0}, "max_num_queued_tokens is 0"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0"),
        ({"send_timeout_s": float("nan")}, "send_timeout_s is nan"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s is -1"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerSettings(**{"model_names": ("m",), **change})


def test_no_answer_allows_other_origins() -> None:
    async def main(served: Running) -> Any:
        async with served.client(Origin="http://elsewhere") as http:
            return await http.get("/v1/models"), await http.options("/v1/models")

    with running() as served:
        for response in run(main(served)):
            assert not [name for name in response.headers if name.startswith("access-control")]


def test_a9_a_text_that_is_too_long_whatever_its_tokens_is_not_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASES A9: megabytes are refused by their bytes; a text that could fit goes to the tokenizer."""
    seen: list[int] = []

    async def main(served: Running) -> Any:
        encode = served.front.codec.encode

        def spy(prompt: Any, *rest: Any) -> list[int]:
            seen.append(len(prompt))
            return encode(prompt, *rest)

        monkeypatch.setattr(served.front.codec, "encode", spy)
        long = await served.ask("/v1/completions", {"prompt": "x" * 1_000_000, "max_tokens": 1})
        chat = [{"role": "user", "content": "y" * 1_000_000}]
        also = await served.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        fits = await served.ask("/v1/completions", {"prompt": "x" * 90, "max_tokens": 1})
        return long, also, fits

    long, also, fits = run_served(main)
    assert (long.status_code, also.status_code, fits.status_code) == (400, 400, 200)
    assert "prompt has 1,000,000 bytes" in long.json()["error"]["message"]
    assert also.json()["error"]["param"] == "messages"
    assert seen == [90]
