"""The official ``openai`` client against a server process: what it sends is understood, what it gets it can read.

Every test runs with SmolLM2, where it is in the cache, and with a tiny model whose output is noise.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from server_processes import get, line, servable, served

SMOLLM2 = "smollm2-135m"
FRANCE = "The capital of France is"
CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 8}
WHOLE: Any = {"ignore_eos": True}
KEY = "a key of ours"


@pytest.fixture(scope="module", params=["tiny", SMOLLM2])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = servable(request.param, tmp_path_factory.mktemp("models"))
    names = ("--served-model-name", request.param, "--served-model-name", "alias")
    with served(model, *names, PAGEDSERVE_API_KEYS=KEY) as server:
        server.wait()
        yield server.url
        text = get(server.url, "/metrics", Authorization=f"Bearer {KEY}").text
        assert line(text, "pagedserve:requests_open").endswith(" 0.0")
        assert "Traceback" not in server.said


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def model(client: OpenAI) -> str:
    """The name that the server lists first."""
    return client.models.list().data[0].id


def asynchronously(url: str, work: Callable[[AsyncOpenAI], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
            return await asyncio.wait_for(work(made), 60)

    return asyncio.run(main())


def test_models(client: OpenAI, model: str) -> None:
    listed = client.models.list().data
    assert [each.id for each in listed] == [model, "alias"]
    assert model in ("tiny", SMOLLM2)


def test_a_completion_and_the_same_one_streamed(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=FRANCE, **GREEDY, extra_body=WHOLE)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    if model == SMOLLM2:
        assert whole.choices[0].text.startswith(" Paris")
    asked: Any = {"prompt": FRANCE, **GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(model=model, **asked, extra_body=WHOLE))
    *told, last = chunks
    assert "".join(chunk.choices[0].text for chunk in told) == whole.choices[0].text
    assert told[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage) == ([], last.usage)
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_chat_and_the_same_one_streamed(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_completion_tokens=8)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert whole.usage is not None
    if model == SMOLLM2:
        assert "Paris" in str(message.content)
    stream = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_completion_tokens=8, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_clients_own_stream_helper(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=CHAT, **GREEDY) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.current_completion_snapshot
    assert texts
    assert "".join(texts) == final.choices[0].message.content


def test_asynchronously_many_at_once(url: str) -> None:
    async def work(client: AsyncOpenAI) -> tuple[list[str], list[str]]:
        async def whole(seed: int) -> str:
            made = await client.completions.create(model="alias", prompt=FRANCE, seed=seed, max_tokens=8)
            return made.choices[0].text

        async def streamed(seed: int) -> str:
            stream = await client.completions.create(
                model="alias", prompt=FRANCE, seed=seed, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        both = await asyncio.gather(*map(whole, range(8)), *map(streamed, range(8)))
        return both[:8], both[8:]

    whole, streamed = asynchronously(url, work)
    assert whole == streamed
    assert len(set(whole)) > 1


def test_leaving_a_stream_early_ends_its_work(url: str) -> None:
    async def work(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model="alias", prompt=FRANCE, max_tokens=1000, stream=True, extra_body=WHOLE
        )
        async for _ in stream:
            break
        await stream.close()

    asynchronously(url, work)
    headers = {"Authorization": f"Bearer {KEY}"}
    while not line(get(url, "/metrics", **headers).text, "num_requests_running").endswith(" 0.0"):
        pass


def test_logprobs_of_completions(client: OpenAI, model: str) -> None:
    made = client.completions.create(model=model, prompt=FRANCE, **GREEDY, logprobs=3, extra_body=WHOLE)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 8
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert 3 <= len(top) + (token not in list(top)[:3]) <= 4
        assert top[token] == logprob == max(top.values())
    assert all(a <= b for a, b in pairwise(found.text_offset))
    if model == SMOLLM2:
        assert "".join(found.tokens) == made.choices[0].text


def test_logprobs_of_chats(client: OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": CHAT, **GREEDY, "logprobs": True, "top_logprobs": 2}
    made = client.chat.completions.create(**asked, extra_body=WHOLE)
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 8
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.bytes is not None
    streamed = client.chat.completions.create(**asked, stream=True, extra_body=WHOLE)
    told = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    pieces = [token for logprobs in told if logprobs is not None for token in logprobs.content or ()]
    assert [token.bytes for token in pieces] == [token.bytes for token in content]


def test_several_samples_and_a_seed(client: OpenAI, model: str) -> None:
    def ask(seed: int) -> list[str]:
        made = client.completions.create(
            model=model, prompt=FRANCE, n=3, seed=seed, max_tokens=12, temperature=1
        )
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        return [choice.text for choice in made.choices]

    first = ask(7)
    assert first == ask(7)
    assert first != ask(8)
    assert len(set(first)) > 1


def test_several_prompts_as_text_and_as_ids(client: OpenAI, model: str) -> None:
    ids = client.post("/../tokenize", cast_to=dict[str, Any], body={"prompt": FRANCE})["tokens"]
    texts = client.completions.create(model=model, prompt=[FRANCE, "Once"], **GREEDY)
    alone = client.completions.create(model=model, prompt=ids, **GREEDY)
    assert texts.choices[0].text == alone.choices[0].text
    assert [choice.index for choice in texts.choices] == [0, 1]


def test_stops_and_what_is_no_sampling_at_all(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=FRANCE, **GREEDY, extra_body=WHOLE).choices[0]
    stop = whole.text[2:4]
    made = client.completions.create(model=model, prompt=FRANCE, **GREEDY, stop=[stop], extra_body=WHOLE)
    assert made.choices[0].finish_reason == "stop"
    assert made.choices[0].text == whole.text[: whole.text.index(stop)]
    echoed = client.completions.create(model=model, prompt=FRANCE, **GREEDY, echo=True, extra_body=WHOLE)
    assert echoed.choices[0].text == FRANCE + whole.text


def test_a_bias_and_penalties(client: OpenAI, model: str) -> None:
    (token,) = client.post("/../tokenize", cast_to=dict[str, Any], body={"prompt": "!"})["tokens"][-1:]
    biased = client.completions.create(model=model, prompt=FRANCE, **GREEDY, logit_bias={str(token): 100})
    assert biased.choices[0].text == "!" * 8
    many = client.completions.create(
        model=model, prompt="!", **GREEDY, logit_bias={str(token): 5}, presence_penalty=2, frequency_penalty=2
    )
    assert many.choices[0].text != biased.choices[0].text


@pytest.mark.parametrize(
    ("change", "words", "param"),
    [
        ({"max_tokens": -1}, "max_tokens is -1", "max_tokens"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"n": 0}, "n is 0", "n"),
        ({"stop": ""}, "empty", "stop"),
        ({"max_tokens": 10**9}, "ask for", "max_tokens"),
        ({"extra_body": {"bananas": 1}}, "is no parameter here", "bananas"),
    ],
)
def test_mistakes_raise_bad_request(
    client: OpenAI, model: str, change: dict[str, Any], words: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": model, "prompt": FRANCE, **change})
    assert words in caught.value.message
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_other_errors_are_of_their_kind(client: OpenAI, model: str, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=[])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="x")
    with (
        OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


def test_an_answer_that_is_any_json(client: OpenAI, model: str) -> None:
    made = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_tokens=200, response_format={"type": "json_object"}
    )
    if made.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(str(made.choices[0].message.content)), dict)
    else:
        assert str(made.choices[0].message.content).lstrip().startswith("{")


class City(BaseModel):
    """The form of an answer."""

    capital: Literal["Paris", "Rome"]
    is_large: bool


def test_an_answer_by_a_json_schema_and_the_clients_parser(client: OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": CHAT, "temperature": 0, "max_tokens": 200}
    schema = {**City.model_json_schema(), "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    made = client.chat.completions.create(**asked, response_format=form)
    assert made.choices[0].finish_reason == "stop"
    assert City.model_validate_json(str(made.choices[0].message.content), strict=True)
    parsed = client.chat.completions.parse(**asked, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_by_a_pattern_or_a_choice(client: OpenAI, model: str, stream: bool) -> None:
    def ask(form: dict[str, Any]) -> str:
        asked: Any = {"model": model, "prompt": FRANCE, "temperature": 1, "seed": 1, "max_tokens": 100}
        made: Any = client.completions.create(**asked, stream=stream, extra_body=form)
        return "".join(each.choices[0].text for each in (made if stream else [made]))

    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", ask({"guided_regex": "[0-9]{3}-[a-f]{2}"}))
    assert ask({"guided_choice": ["Paris", "Rome, of course"]}) in ("Paris", "Rome, of course")
    assert ask({"structured_outputs": {"choice": ["yes"]}}) == "yes"
    with pytest.raises(openai.BadRequestError, match="unclosed character class") as caught:
        ask({"guided_regex": "(["})
    assert caught.value.param in ("guided_regex", "structured_outputs")
