"""What requests may ask of the choice of tokens, over HTTP: the engine's own, told as clients expect."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from engine_models import engine_of, greedy, ids_of, prompts, run_all, scripted
from engine_serving import run
from server_apps import Running, running, texts_of, usage_of

PROMPT = "The moon is"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def _run(main: Any, **options: Any) -> Any:
    with running(**options) as served:
        return run(main(served))


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

    alone, among = _run(main)
    assert alone["choices"][0]["text"] == among["choices"][0]["text"] == expected


def test_echo_with_logprobs_tells_the_prompts_tokens_first() -> None:
    """As lm-eval asks: the prompt's own logprobs, of a prompt that is in the prefix cache (CASES B10)."""
    prompt = PROMPT * 3
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 2}

    async def main(served: Running) -> Any:
        await served.complete(prompt=prompt, max_tokens=1)
        cached = await served.complete(prompt=prompt, max_tokens=1)
        return cached, await served.complete(**body), await served.stream(**body)

    cached, whole, chunks = _run(main)
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

    whole, chunks = _run(main)
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "de"] == texts_of(chunks, 2)
    assert [choice["logprobs"]["tokens"] for choice in whole["choices"]] == [list("abc"), list("de")]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
    assert whole["usage"] == usage_of(5, 0)


def test_without_echo_no_tokens_are_too_few() -> None:
    async def main(served: Running) -> Any:
        return (await served.ask("/v1/completions", {"prompt": "x", "max_tokens": 0})).json()

    assert "ask for at least one token" in _run(main)["error"]["message"]


def test_prompt_logprobs_in_vllms_form() -> None:
    async def main(served: Running) -> Any:
        completion = await served.complete(prompt=[PROMPT, "Once"], max_tokens=1, prompt_logprobs=1)
        asked = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
        chat = (await served.ask(CHAT, asked)).json()
        streamed = await served.ask(CHAT, {**asked, "stream": True})
        return completion, chat, streamed

    completion, chat, streamed = _run(main)
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


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_grammar": 'start: "<" /[a-c]/ ">"'}, "<[a-c]>"),
    ({"structured_outputs": {"regex": "x{2,4}"}}, "x{2,4}"),
    ({"structured_outputs": {"choice": ["one"]}}, "one"),
]


@pytest.mark.parametrize(("asked", "pattern"), FORMS)
def test_an_output_has_the_form_that_was_asked_for(asked: dict[str, Any], pattern: str) -> None:
    body: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 60, "seed": 3, **asked}

    async def main(served: Running) -> Any:
        whole = await served.complete(prompt=PROMPT, n=3, **body)
        chat = (await served.ask(CHAT, {"messages": MESSAGES, **body})).json()
        return whole, chat, await served.stream(prompt=PROMPT, n=3, **body)

    whole, chat, chunks = _run(main)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == texts_of(chunks, 3)
    for text in [*texts, chat["choices"][0]["message"]["content"]]:
        assert re.fullmatch(pattern, text), text
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}


@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            }
        },
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object"}, "wanted": '{"n": [1, {"ok": null}]}'},
        {"structured_outputs": {"json_object": True}, "wanted": "{}"},
    ],
)
def test_json_is_what_the_schema_says(asked: dict[str, Any]) -> None:
    wanted = asked.pop("wanted", '{"ok": true, "n": 7}')
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, **asked}

    async def main(served: Running) -> Any:
        with scripted(served.engine, lambda _: ids_of(wanted)):
            return (await served.ask(CHAT, body)).json()

    (choice,) = _run(main)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (wanted, "stop")


def test_text_is_the_form_of_no_form() -> None:
    async def main(served: Running) -> Any:
        plain = await served.complete(prompt=PROMPT, max_tokens=5)
        return plain, await served.complete(prompt=PROMPT, max_tokens=5, response_format={"type": "text"})

    plain, text = _run(main)
    assert plain["choices"] == text["choices"]


def test_forms_are_compiled_beside_running_requests_and_mixed_with_them() -> None:
    """A batch of forms, broken forms and free text; each gets its own answer."""
    words = prompts(6, 3)

    async def main(served: Running) -> Any:
        bodies: list[dict[str, Any]] = [
            {"guided_regex": f"{'ab'[i % 2]}{{{i + 1}}}"} if i % 3 else {"guided_regex": "("}
            for i in range(12)
        ]
        talks = [
            served.talk("/v1/completions", {"prompt": list(words[i % 6]), "max_tokens": 30, **body})
            for i, body in enumerate(bodies)
        ]
        for talk in talks:
            await talk.task
        await served.at_rest()
        return [(talk.status, json.loads(talk.text)) for talk in talks]

    for index, (status, answer) in enumerate(_run(main)):
        if index % 3 == 0:
            assert (status, answer["error"]["param"]) == (400, "guided_regex")
        else:
            assert answer["choices"][0]["text"].lstrip("\N{REPLACEMENT CHARACTER}") == "ab"[index % 2] * (
                index + 1
            )


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no output has this form"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no output has this form"),
        (
            {"guided_choice": ["red"], "allowed_token_ids": [5]},
            "allowed_token_ids",
            "no token with which an output",
        ),
        ({"repetition_penalty": 1e-38}, "repetition_penalty", "repetition_penalty is 1e-38"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "response_format",
            "make the type json_schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strickt": 1},
                }
            },
            "response_format",
            "strickt",
        ),
    ],
)
def test_h2_what_cannot_be_is_refused_and_never_counts_as_accepted(
    asked: dict[str, Any], param: str, words: str
) -> None:
    """CASES H2 and H3: a client's mistake is a 400, before anything counts as accepted or ended."""

    async def main(served: Running) -> Any:
        answer = await served.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, **asked})
        await served.at_rest()
        return answer, served.front.counts.num_accepted, dict(served.front.counts.ended)

    answer, num_accepted, ended = _run(main)
    error = answer.json()["error"]
    assert (answer.status_code, num_accepted, ended) == (400, 0, {})
    assert error["param"].startswith(param), error
    assert words in error["message"]


def test_a_form_that_leaves_nothing_later_on_is_the_callers() -> None:
    """The first token may be an a; then only a b fits, which is not allowed: 400 and not 500."""
    body = {"prompt": PROMPT, "guided_regex": "ab", "allowed_token_ids": ids_of("a")}

    async def main(served: Running) -> Any:
        whole = await served.ask("/v1/completions", body)
        streamed = await served.ask("/v1/completions", {**body, "stream": True})
        await served.at_rest()
        return whole, streamed

    whole, streamed = _run(main)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "nothing_allowed")
    assert '"code":"nothing_allowed"' in streamed.text.replace(" ", "")


def test_one_of_is_taken_as_any_of() -> None:
    """Pydantic's discriminated unions have oneOf, with strictness that no client can switch on."""
    schema = {"oneOf": [{"const": 1}, {"const": 2}]}

    async def main(served: Running) -> Any:
        return await served.complete(prompt=PROMPT, max_tokens=8, guided_json=schema)

    assert _run(main)["choices"][0]["text"] in ("1", "2")


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
        also = await served.ask(CHAT, {"messages": chat, "max_tokens": 1})
        fits = await served.ask("/v1/completions", {"prompt": "x" * 90, "max_tokens": 1})
        return long, also, fits

    long, also, fits = _run(main)
    assert (long.status_code, also.status_code, fits.status_code) == (400, 400, 200)
    assert "prompt has 1,000,000 bytes" in long.json()["error"]["message"]
    assert also.json()["error"]["param"] == "messages"
    assert seen == [90]
