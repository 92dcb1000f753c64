"""The form that an output must have, over HTTP: every way to ask for one, and forms that cannot be had."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from engine_models import ids_of, prompts, scripted
from server_apps import Running, run_served, texts_of

PROMPT = "The moon is"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
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

    whole, chat, chunks = run_served(main)
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

    (choice,) = run_served(main)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (wanted, "stop")


def test_text_is_the_form_of_no_form() -> None:
    async def main(served: Running) -> Any:
        plain = await served.complete(prompt=PROMPT, max_tokens=5)
        return plain, await served.complete(prompt=PROMPT, max_tokens=5, response_format={"type": "text"})

    plain, text = run_served(main)
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

    for index, (status, answer) in enumerate(run_served(main)):
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

    answer, num_accepted, ended = run_served(main)
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

    whole, streamed = run_served(main)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "nothing_allowed")
    assert '"code":"nothing_allowed"' in streamed.text.replace(" ", "")


def test_one_of_is_taken_as_any_of() -> None:
    """Pydantic's discriminated unions have oneOf, with strictness that no client can switch on."""
    schema = {"oneOf": [{"const": 1}, {"const": 2}]}

    async def main(served: Running) -> Any:
        return await served.complete(prompt=PROMPT, max_tokens=8, guided_json=schema)

    assert run_served(main)["choices"][0]["text"] in ("1", "2")
