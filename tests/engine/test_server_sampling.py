"""What requests may ask of the choice of tokens and of their logprobs, over HTTP: the engine's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_models import engine_of, greedy, ids_of, run_all
from server_apps import Running, run_served, texts_of, usage_of

PROMPT = "The moon is"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def _text(prompt: str, **options: Any) -> str:
    with engine_of("vllm_v1") as engine:
        return run_all(engine, [prompt], greedy(40, **options))[0].text


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 1.5},
        {"logit_bias": {str(ids_of("x")[0]): 5, str(ids_of("y")[0]): 4.5}},
        {"allowed_token_ids": ids_of("abcdef")},
    ],
)
def test_s2_penalties_and_biases_are_the_engines_whatever_the_neighbours(asked: dict[str, Any]) -> None:
    """CASES S2, over HTTP: alone, and with neighbours that ask for other things."""
    own = {**asked}
    if "logit_bias" in own:
        own["logit_bias"] = {int(key): value for key, value in own["logit_bias"].items()}
    expected = _text(PROMPT, **own)
    assert expected != _text(PROMPT)

    async def main(served: Running) -> Any:
        alone = await served.complete(prompt=PROMPT, max_tokens=40, **asked)
        served.gate.close()
        neighbours = [
            served.talk("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "frequency_penalty": i / 4})
            for i in range(4)
        ]
        me = served.talk(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **asked},
        )
        await served.until(lambda: len(served.front.open) == 5)
        served.gate.open()
        await me.task
        for neighbour in neighbours:
            await neighbour.task
        return alone, json.loads(me.text)

    alone, among = run_served(main)
    assert alone["choices"][0]["text"] == among["choices"][0]["text"] == expected


def test_echo_with_logprobs_tells_the_prompts_tokens_first() -> None:
    """As lm-eval asks: the prompt's own logprobs, of a prompt that is in the prefix cache (CASES B10)."""
    prompt = PROMPT * 3
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 2}

    async def main(served: Running) -> Any:
        await served.complete(prompt=prompt, max_tokens=1)
        cached = await served.complete(prompt=prompt, max_tokens=1)
        return cached, await served.complete(**body), await served.stream(**body)

    cached, whole, chunks = run_served(main)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    (choice,) = whole["choices"]
    told, size = choice["logprobs"], len(prompt)
    assert choice["text"].startswith(prompt)
    assert whole["usage"] == usage_of(size, 2)
    assert [len(told[name]) for name in told] == [size + 2] * 4
    assert told["tokens"][:size] == list(prompt)
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["text_offset"][: size + 1] == list(range(size + 1))
    with engine_of("vllm_v1") as engine:
        (own,) = run_all(engine, [prompt], greedy(2, prompt_logprobs=2, logprobs=2))
    assert own.prompt_logprobs is not None
    expected = [None if entry is None else entry.chosen.logprob for entry in own.prompt_logprobs]
    assert told["token_logprobs"][1:size] == pytest.approx(expected[1:], abs=1e-5)
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:size])
    first, *_ = (chunk["choices"][0] for chunk in chunks)
    assert first["logprobs"]["tokens"][:size] == list(prompt)
    assert first["logprobs"]["token_logprobs"] == told["token_logprobs"][: size + 1]
    assert texts_of(chunks) == [choice["text"]]


def test_an_echo_may_be_all_that_is_wanted() -> None:
    """max_tokens 0 with echo: the prompt and its logprobs, no output, none counted."""
    body: dict[str, Any] = {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True, "logprobs": 0}

    async def main(served: Running) -> Any:
        return await served.complete(**body), await served.stream(**body)

    whole, chunks = run_served(main)
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "de"] == texts_of(chunks, 2)
    assert [choice["logprobs"]["tokens"] for choice in whole["choices"]] == [list("abc"), list("de")]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
    assert whole["usage"] == usage_of(5, 0)


def test_without_echo_no_tokens_are_too_few() -> None:
    async def main(served: Running) -> Any:
        return (await served.ask("/v1/completions", {"prompt": "x", "max_tokens": 0})).json()

    assert "ask for at least one token" in run_served(main)["error"]["message"]


def test_prompt_logprobs_in_vllms_form() -> None:
    async def main(served: Running) -> Any:
        completion = await served.complete(prompt=[PROMPT, "Once"], max_tokens=1, prompt_logprobs=1)
        asked = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
        chat = (await served.ask(CHAT, asked)).json()
        streamed = await served.ask(CHAT, {**asked, "stream": True})
        return completion, chat, streamed

    completion, chat, streamed = run_served(main)
    for choice, text in zip(completion["choices"], (PROMPT, "Once"), strict=True):
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for char, told in zip(text[1:], others, strict=True):
            own = told[str(ids_of(char)[0])]
            assert own["decoded_token"] == char
            assert own["rank"] >= 1
            assert min(entry["rank"] for entry in told.values()) == 1
            assert len(told) == (1 if own["rank"] == 1 else 2)
    assert [told and len(told) for told in chat["prompt_logprobs"]] == [None, *[1] * 3]
    assert (streamed.status_code, "whole answers only" in streamed.text) == (400, True)
