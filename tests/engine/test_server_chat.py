"""``/v1/chat/completions``: the model's template, and the same output as of the prompt that it makes."""

from typing import Any

import pytest
from engine_models import engine_of, greedy, ids_of, run_all
from server_apps import Running, run_served, usage_of

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
IDS = [257, *ids_of("hi"), 257, *ids_of("yes"), 256]
GREEDY = {"temperature": 0, "ignore_eos": True}


def _expected() -> str:
    with engine_of("vllm_v1") as engine:
        return run_all(engine, [IDS], greedy(6))[0].text


async def _chat(served: Running, **body: Any) -> Any:
    response = await served.ask(PATH, {"messages": MESSAGES, **GREEDY, **body})
    return response.status_code, response.json()


def test_whole_and_streamed_continue_what_the_template_makes() -> None:
    async def main(served: Running) -> Any:
        whole = await _chat(served, max_tokens=6)
        return whole, await served.stream(PATH, messages=MESSAGES, max_completion_tokens=6)

    (status, whole), chunks = run_served(main)
    assert status == 200
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": _expected(), "refusal": None}
    assert (choice["finish_reason"], whole["object"]) == ("length", "chat.completion")
    assert whole["usage"] == usage_of(len(IDS), 6)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == _expected()
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * 6
    assert len(deltas) == 7, "the role comes with the first token (CASES H1): one for each, and the end"


def test_without_a_limit_the_answer_may_fill_the_model() -> None:
    async def main(served: Running) -> Any:
        return await _chat(served)

    status, whole = run_served(main)
    assert (status, whole["usage"]["total_tokens"]) == (200, 96)


def test_parts_of_text_are_one_text_and_others_are_refused() -> None:
    def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    async def main(served: Running) -> Any:
        text, more = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
        tokens = await served.ask("/tokenize", {"messages": message(text, more)})
        picture = {"type": "image_url", "image_url": {"url": "data:"}}
        return tokens.json(), await _chat(served, messages=message(text, picture))

    tokens, (status, refusal) = run_served(main)
    assert tokens["tokens"] == [257, *ids_of("a\nb"), 256]
    assert status == 400
    assert "messages[0].content[1] is {'type': 'image_url'" in refusal["error"]["message"]


def test_the_template_is_given_what_is_asked_for() -> None:
    async def main(served: Running) -> Any:
        body: dict[str, Any] = {"messages": MESSAGES, "chat_template_kwargs": {"shout": True}}
        shouted = await served.ask("/tokenize", body)
        bare = await served.ask("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
        return shouted.json()["tokens"], bare.json()["tokens"]

    shouted, bare = run_served(main)
    assert shouted == [*IDS[:-1], *ids_of("!"), 256]
    assert bare == IDS[:-1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "who is nobody?"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has tokenize"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is '{{ 1 }}'"),
        ({"continue_final_message": True}, "set one of them to false"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "give one of them"),
        ({"top_logprobs": 3}, "set logprobs to true"),
        ({"logprobs": True, "top_logprobs": 21}, "ask for 0 to 20"),
        ({"tools": [{"type": "function"}]}, "this server does not have tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "no json_schema; add one"),
    ],
)
def test_what_cannot_be_done_is_refused(body: dict[str, Any], words: str) -> None:
    async def main(served: Running) -> Any:
        return await _chat(served, **body), await _chat(served, max_tokens=1)

    (status, refusal), (after, _) = run_served(main)
    assert (status, after) == (400, 200)
    assert words in refusal["error"]["message"]


def test_a_model_without_a_template_says_so() -> None:
    async def main(served: Running) -> Any:
        return await _chat(served)

    status, refusal = run_served(main, chat=False)
    assert (status, refusal["error"]["code"]) == (400, "no_chat_template")


def test_logprobs_have_the_tokens_bytes() -> None:
    async def main(served: Running) -> Any:
        body: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}
        return await _chat(served, **body), await served.stream(PATH, messages=MESSAGES, **body)

    (_, whole), chunks = run_served(main)
    told = whole["choices"][0]["logprobs"]["content"]
    assert len(told) == 4
    for position in told:
        assert position["top_logprobs"][0]["logprob"] == position["logprob"]
        assert len(position["top_logprobs"]) == 2
        assert bytes(position["bytes"]).decode(errors="replace") == position["token"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [piece["content"][0] for piece in streamed[:4]] == told
    assert streamed[4] is None


def test_several_samples_of_a_chat() -> None:
    async def main(served: Running) -> Any:
        body: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 4}
        return await _chat(served, **body), await served.stream(PATH, messages=MESSAGES, **body)

    (_, whole), chunks = run_served(main)
    texts = ["", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert texts[0] != texts[1]
