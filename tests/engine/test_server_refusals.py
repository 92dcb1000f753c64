"""CASES H3: what is wrong with a request is told in OpenAI's form, with the value; the engine never sees it."""

import json
import re
from typing import Any
from unittest import mock

import pytest
from engine_serving import run
from server_apps import Running, run_served, running

from pagedserve.engine.server.unsupported import _HINTS, _NEUTRAL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MISTAKES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "prompt is None; give text"),
    ({"prompt": []}, "prompt", "prompt is an empty list"),
    ({"prompt": ""}, "prompt", "has 0 prompt tokens; send at least 1"),
    ({"prompt": [[]]}, "prompt", "prompt[0] is []"),
    ({"prompt": ["a", [1]]}, "prompt", "a list of one kind of them"),
    ({"prompt": ["a", ""]}, "prompt", "has 0 prompt tokens"),
    ({"prompt": [1, True]}, "prompt", "prompt[0] is 1"),
    ({"prompt": [1, 2.5]}, "prompt", "prompt[0] is 1"),
    ({"prompt": [1, 258]}, "prompt", "prompt[1] is 258; the model's ids are 0 to 257"),
    ({"prompt": [[1], [-1]]}, "prompt", "prompt[1][0] is -1"),
    ({"prompt": [1] * 96}, "prompt", "has 96 prompt tokens; max_model_len is 96"),
    ({"prompt": "\ud800"}, "prompt", "half a surrogate pair at character 0"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; ask for at least one token"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ({"max_tokens": 2.5}, "max_tokens", "max_tokens is 2.5"),
    ({"max_tokens": "9"}, "max_tokens", "max_tokens is '9'"),
    ({"max_tokens": True}, "max_tokens", "max_tokens is True"),
    ({"max_tokens": 96}, "max_tokens", "the prompt has 1 tokens; prompt and output together may have 96"),
    ({"max_tokens": 10**30}, "max_tokens", "max_tokens is 1000000000"),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1; it must lie in [0.0, 100.0]"),
    ({"temperature": 101}, "temperature", "temperature is 101"),
    ({"temperature": "hot"}, "temperature", "temperature is 'hot'"),
    ({"top_p": 0}, "top_p", "top_p is 0"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"min_p": 1.5}, "min_p", "min_p is 1.5"),
    ({"n": 0}, "n", "n is 0; ask for 1 to 128 samples"),
    ({"n": 129}, "n", "n is 129; ask for 1 to 128 samples"),
    ({"n": 10**9}, "n", "n is 1000000000"),
    (
        {"prompt": ["a"] * 20, "n": 60},
        "n",
        "1200 outputs (prompts times n) and the queue has places for 1024",
    ),
    ({"seed": 2**63}, "seed", "signed 64-bit seed"),
    ({"seed": 1.5}, "seed", "seed is 1.5"),
    ({"stop": ""}, "stop", "stop[0] is empty"),
    ({"stop": ["a", ""]}, "stop", "stop[1] is empty"),
    ({"stop": [1]}, "stop", "stop is [1]"),
    ({"stop": ["x"] * 65}, "stop", "65 texts; give 64 at most"),
    ({"stop": "x" * 1025}, "stop", "1025 characters; give 1024 at most"),
    ({"stop_token_ids": [258]}, "stop_token_ids", "stop_token_ids[0] is 258"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids[0] is 'a'"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens is 17, above max_tokens, 16"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
    ({"logprobs": 21}, "logprobs", "ask for 0 to 20"),
    ({"logprobs": -1}, "logprobs", "logprobs is -1"),
    ({"logprobs": True}, "logprobs", "logprobs is True"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "ask for 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3"),
    ({"frequency_penalty": "much"}, "frequency_penalty", "frequency_penalty is 'much'"),
    ({"logit_bias": {"258": 1}}, "logit_bias", "logit_bias has the id 258; the model's ids are 0 to 257"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has the key 'a'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] is 101"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 tokens; give 1024 at most"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is empty"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids", "allowed_token_ids[0] is 999"),
    ({"guided_regex": "(a"}, "guided_regex", "cannot be used: unclosed group"),
    ({"guided_regex": ""}, "guided_regex", "guided_regex is empty"),
    ({"guided_choice": []}, "guided_choice", "guided_choice is empty"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "guided_choice[1] is ''"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_regex", "ask for a form each; give one of them"),
    ({"guided_json": {"type": "wat"}}, "guided_json", "guided_json cannot be used"),
    (
        {"structured_outputs": {"regex": "(a"}},
        "structured_outputs",
        "structured_outputs.regex cannot be used",
    ),
    ({"guided_json": 5}, "guided_json", "guided_json"),
    ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs", "json and regex"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 2},
        "min_tokens",
        "min_tokens is 2 beside response_format",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
    ({"ignore_eos": "yes"}, "ignore_eos", "ignore_eos is 'yes'"),
    ({"stream": 1}, "stream", "stream is 1"),
    ({"stream_options": {"include_usage": True}}, None, "stream is not true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage is 1"),
    ({"priority": 2**31}, "priority", "priority is 2147483648"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt is ''"),
    ({"user": "x" * 257}, "user", "user is"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"wholly_new": 1}, "wholly_new", "'wholly_new' is no parameter here; leave it out"),
]
NOT_NEUTRAL: dict[str, Any] = {
    "service_tier": "priority",
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "parallel_tool_calls": 1,
    "spaces_between_special_tokens": False,
    "include_reasoning": False,
}


async def _ask(served: Running, path: str, content: bytes, kind: str = "application/json") -> Any:
    async with served.client() as http:
        return await http.post(path, content=content, headers={"Content-Type": kind})


async def _is_unharmed(served: Running) -> None:
    await served.at_rest()
    assert (await served.complete(prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2


def _error(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (name, error), *rest = response.json().items()
    assert (name, rest, set(error)) == ("error", [], {"message", "type", "param", "code"})
    return error


def test_every_mistake_is_refused_with_its_value_streamed_or_not() -> None:
    async def main(served: Running) -> None:
        for mistake, param, words in MISTAKES:
            for stream in (False, True):
                body = {
                    "prompt": "x",
                    **({"stream": True} if stream and "stream_options" not in mistake else {}),
                }
                error = _error(await _ask(served, COMPLETIONS, json.dumps({**body, **mistake}).encode()))
                assert words in error["message"], (mistake, error)
                assert param is None or error["param"].startswith(param), (mistake, error)
                assert error["type"] == "invalid_request_error"
        await _is_unharmed(served)

    with running() as served:
        run(main(served))


LONGEST, LEAST = "max_completion_tokens", "min_tokens"


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({LONGEST: 96}, LONGEST, r"^max_completion_tokens is 96 and the prompt has \d+ tokens"),
        ({LONGEST: 3, LEAST: 5}, LEAST, "above max_completion_tokens, 3: lower"),
        ({LEAST: 95}, LEAST, r"min_tokens is 95 and the prompt has \d+ tokens, which leave room"),
    ],
)
def test_a_chats_mistakes_are_told_by_its_own_names(asked: dict[str, Any], param: str, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], **asked}

    async def main(served: Running) -> Any:
        return await served.ask(CHAT, body)

    error = _error(run_served(main))
    assert re.search(words, error["message"]), error
    assert error["param"] == param


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": ', "no JSON: Expecting value at character 11"),
        (b"", "cannot be read"),
        (b"[]", "the body is or has []"),
        (b'"x"', "the body is or has 'x'"),
        (b"null", "cannot be read"),
        (b"\xff\xfe", ""),
        (b'{"prompt": "x", "\\ud800": 1}', "cannot be read"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature is nan"),
        (b'{"prompt": "x", "temperature": Infinity}', "temperature is inf"),
        (b'{"prompt": ' + b"[" * 100_000, ""),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_bodies_that_are_no_request(content: bytes, words: str) -> None:
    async def main(served: Running) -> None:
        assert words in _error(await _ask(served, COMPLETIONS, content))["message"]
        await _is_unharmed(served)

    with running() as served:
        run(main(served))


def test_a_body_needs_its_content_type() -> None:
    async def main(served: Running) -> Any:
        return await _ask(served, COMPLETIONS, b'{"prompt": "x"}', "application/x-www-form-urlencoded")

    with running() as served:
        assert "Content-Type: application/json" in _error(run(main(served)))["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_the_engine_lacks_is_refused_unless_it_asks_for_nothing(path: str) -> None:
    """Every name of the table, with null, with its neutral values, and with another."""
    start = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}

    async def main(served: Running) -> None:
        for name, neutral in _NEUTRAL.items():
            for value in (None, *neutral):
                response = await served.ask(path, {**start, "max_tokens": 1, name: value})
                assert response.status_code == 200, (name, value, response.text)
            wrong = NOT_NEUTRAL.get(name, 2 if name != "metadata" else {"a": "b"})
            error = _error(await served.ask(path, {**start, "max_tokens": 1, name: wrong}))
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert error["message"].startswith(f"{name} is {wrong!r}; this server does not have {name}")
        for name in _HINTS:
            assert (await served.ask(path, {**start, "max_tokens": 1, name: "anything"})).status_code == 200
        await _is_unharmed(served)

    with running() as served:
        run(main(served))


def test_names_that_are_not_served_paths_and_methods() -> None:
    async def main(served: Running) -> None:
        async with served.client() as http:
            for path in (COMPLETIONS, "/tokenize", "/detokenize"):
                body = {"model": "gpt-4", "prompt": "x", "tokens": [1]}
                body = {
                    k: v
                    for k, v in body.items()
                    if k == "model" or (k == "tokens") == (path == "/detokenize")
                }
                error = _error(await http.post(path, json=body), 404)
                assert error["code"] == "model_not_found"
                assert "'gpt-4' is not served here; ask for tiny or alias" in error["message"]
            assert "/nothing here" in _error(await http.get("/nothing"), 404)["message"]
            refused = await http.get(COMPLETIONS)
            assert "use POST" in _error(refused, 405)["message"]
            assert refused.headers["allow"] == "POST"

    with running() as served:
        run(main(served))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", {"prompt": 5}, "prompt is 5"),
        ("/tokenize", {"prompt": "x", "promt": 1}, "did you mean prompt?"),
        ("/detokenize", {"tokens": [258]}, "is 258; the model's ids are 0 to 257"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0] is 'a'"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_mistakes_about_tokens(path: str, body: dict[str, Any], words: str) -> None:
    async def main(served: Running) -> Any:
        return await served.ask(path, body)

    with running() as served:
        assert words in _error(run(main(served)))["message"]


def test_an_unforeseen_error_is_told_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """It stands in the log; and the next request is served."""

    async def main(served: Running) -> None:
        for stream in (False, True):
            with mock.patch.object(served.front.codec, "encode", side_effect=ZeroDivisionError("a secret")):
                answer = await served.ask(COMPLETIONS, {"prompt": "text", "stream": stream})
            message = _error(answer, 500)["message"]
            assert message == "the server failed (ZeroDivisionError); its log says more"
        await _is_unharmed(served)

    with running() as served:
        run(main(served))
    assert "ZeroDivisionError" in caplog.text
    assert "a secret" in caplog.text
