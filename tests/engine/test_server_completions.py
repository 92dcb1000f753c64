"""``/v1/completions`` and the paths about tokens: what an OpenAI client gets is what the engine made."""

from itertools import pairwise
from typing import Any

import pytest
from engine_models import engine_of, greedy, ids_of, run_all, scripted
from server_apps import MODEL, Running, run_served, texts_of, usage_of

PROMPT = "The moon is"
HARD_TEXT = "👩‍👩‍👧 שלום 漢字 é! 🇫🇷"


def _expected(prompt: str | list[int], **options: Any) -> Any:
    with engine_of("vllm_v1") as engine:
        return run_all(engine, [prompt], greedy(10, **options))[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_whole_and_streamed_are_the_engines_own_output(depth: int) -> None:
    async def main(served: Running) -> Any:
        whole = await served.complete(prompt=PROMPT, max_tokens=10)
        return whole, await served.stream(prompt=PROMPT, max_tokens=10)

    whole, chunks = run_served(main, depth=depth)
    expected = _expected(PROMPT)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert (choice["index"], choice["stop_reason"], choice["logprobs"]) == (0, None, None)
    assert whole["usage"] == usage_of(11, 10)
    assert (whole["object"], whole["model"]) == ("text_completion", MODEL)
    assert texts_of(chunks) == [expected.text]
    assert len(chunks) == 11, "one for each token, and the end"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 10 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        (PROMPT, 1),
        (ids_of(PROMPT), 1),
        ([PROMPT, "Once"], 2),
        ([ids_of(PROMPT), ids_of("Once")], 2),
    ],
)
def test_every_shape_of_prompt(prompt: Any, count: int) -> None:
    """Choices come in the order of the prompts, whole and streamed."""

    async def main(served: Running) -> Any:
        whole = await served.complete(prompt=prompt, max_tokens=10)
        return whole, await served.stream(prompt=prompt, max_tokens=10)

    whole, chunks = run_served(main)
    expected = [_expected(PROMPT).text, _expected("Once").text][:count]
    assert [choice["text"] for choice in whole["choices"]] == expected == texts_of(chunks, count)
    assert [choice["index"] for choice in whole["choices"]] == list(range(count))
    assert whole["usage"]["completion_tokens"] == 10 * count


def test_samples_differ_and_a_seed_repeats_them() -> None:
    body = {"prompt": [PROMPT, "Once"], "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 8}

    async def main(served: Running) -> Any:
        one = await served.complete(**body)
        return one, await served.complete(**body), await served.stream(**body)

    one, again, chunks = run_served(main)
    texts = [choice["text"] for choice in one["choices"]]
    assert len(texts) == len(set(texts)) == 6
    assert texts == [choice["text"] for choice in again["choices"]] == texts_of(chunks, 6)
    assert one["usage"]["prompt_tokens"] == 11 + 4


def test_usage_of_a_stream_is_told_at_the_end_and_if_asked_all_along() -> None:
    """Options of streams that are unknown here are let be."""

    async def main(served: Running) -> Any:
        options: dict[str, Any] = {"include_usage": True, "include_obfuscation": False}
        at_end = await served.stream(prompt=PROMPT, max_tokens=3, stream_options=options)
        options["continuous_usage_stats"] = True
        return at_end, await served.stream(prompt=PROMPT, max_tokens=3, stream_options=options)

    at_end, all_along = run_served(main)
    assert [chunk["usage"] for chunk in at_end] == [None] * 4 + [usage_of(11, 3)]
    assert [chunk["usage"]["completion_tokens"] for chunk in all_along] == [1, 2, 3, 3, 3]
    assert at_end[-1]["choices"] == all_along[-1]["choices"] == []


@pytest.mark.parametrize("prompt", [HARD_TEXT, ids_of(HARD_TEXT)])
def test_echo_repeats_the_prompt_once(prompt: Any) -> None:
    async def main(served: Running) -> Any:
        whole = await served.complete(prompt=prompt, echo=True, max_tokens=4, n=2)
        return whole, await served.stream(prompt=prompt, echo=True, max_tokens=4, n=2)

    whole, chunks = run_served(main)
    for text, streamed in zip(
        [choice["text"] for choice in whole["choices"]], texts_of(chunks, 2), strict=True
    ):
        assert text == streamed
        assert text.startswith(HARD_TEXT)
        assert text.count(HARD_TEXT) == 1


def test_characters_split_over_tokens_come_whole() -> None:
    """CASES T1, over HTTP: no chunk has a U+FFFD, and together they are the text."""

    async def main(served: Running) -> Any:
        with scripted(served.engine, lambda _: ids_of(HARD_TEXT)):
            return await served.stream(prompt=PROMPT, max_tokens=len(ids_of(HARD_TEXT)))

    chunks = run_served(main)
    assert texts_of(chunks) == [HARD_TEXT]
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk["choices"][0]["text"] for chunk in chunks)


def test_a_stop_string_ends_the_text_and_nothing_of_it_is_ever_sent() -> None:
    """CASES T2, over HTTP: not even where it comes in pieces; other text is not held back."""

    async def main(served: Running) -> Any:
        with scripted(served.engine, lambda _: ids_of("ABCDEFGHIJK")):
            body: dict[str, Any] = {"prompt": PROMPT, "stop": ["DEFGHIJ", "XY"], "max_tokens": 20}
            return await served.complete(**body), await served.stream(**body)

    whole, chunks = run_served(main)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ABC", "stop", "DEFGHIJ")
    assert [chunk["choices"][0]["text"] for chunk in chunks[:3]] == ["A", "B", "C"]
    assert texts_of(chunks) == ["ABC"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "DEFGHIJ"


def test_stop_ids_and_the_end_mark() -> None:
    async def main(served: Running) -> Any:
        with scripted(served.engine, lambda _: [*ids_of("AB"), 256]):
            by_id = await served.complete(prompt=PROMPT, stop_token_ids=ids_of("B"), max_tokens=9)
            return by_id, await served.complete(prompt=PROMPT, ignore_eos=False, max_tokens=9)

    by_id, by_mark = run_served(main)
    assert [by_id["choices"][0][key] for key in ("text", "stop_reason")] == ["A", ids_of("B")[0]]
    assert [by_mark["choices"][0][key] for key in ("text", "finish_reason")] == ["AB", "stop"]


def test_logprobs_are_the_engines() -> None:
    async def main(served: Running) -> Any:
        with scripted(served.engine, lambda _: [*ids_of("Aé")]):
            body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2}
            return await served.complete(**body), await served.stream(**body)

    whole, chunks = run_served(main)
    told = whole["choices"][0]["logprobs"]
    assert told["tokens"] == ["A", "bytes:\\xc3", "bytes:\\xa9"]
    assert told["text_offset"] == [0, 1, 2]
    for name, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[name] == logprob == max(top.values())
        assert logprob == pytest.approx(0, abs=1e-6)
        assert len(top) == 2
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [piece["tokens"] for piece in pieces[:3]] == [["A"], ["bytes:\\xc3"], ["bytes:\\xa9"]]
    assert [piece["text_offset"] for piece in pieces[:3]] == [[0], [1], [2]]
    assert pieces[3] is None


def test_zero_logprobs_tell_the_sampled_token_alone_and_ids_may_be_their_names() -> None:
    async def main(served: Running) -> Any:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 0}
        return await served.complete(**body, return_tokens_as_token_ids=True)

    told = run_served(main)["choices"][0]["logprobs"]
    assert [list(top) for top in told["top_logprobs"]] == [[token] for token in told["tokens"]]
    assert told["tokens"] == [f"token_id:{token}" for token in _expected(PROMPT).token_ids[:3]]


def test_what_is_for_the_policy_reaches_it() -> None:
    async def main(served: Running) -> Any:
        await served.complete(prompt=PROMPT, max_tokens=1, priority=-7, user="ann")
        return (await served.served.record()).requests.to_pylist()

    (row,) = run_served(main)
    assert (row["priority"], row["tenant"], row["max_tokens"]) == (-7, "ann", 1)


def test_a_salt_keeps_prefixes_apart() -> None:
    async def main(served: Running) -> Any:
        hits = []
        for salt in (None, "a", "a", "b", None):
            await served.complete(prompt=PROMPT, max_tokens=1, cache_salt=salt)
            hits.append(served.front.backend.stats().counts.num_prefix_hit_tokens)
        return hits

    hits = run_served(main)
    assert [later - sooner for sooner, later in pairwise([0, *hits])] == [0, 0, 8, 0, 8]


def test_names_versions_and_tokens() -> None:
    async def main(served: Running) -> Any:
        async with served.client() as http:
            models = (await http.get("/v1/models")).json()["data"]
            version = (await http.get("/version")).json()
            tokens = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
            text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
            chat = {"messages": [{"role": "user", "content": "hé"}], "model": "alias"}
            return models, version, tokens, text, (await http.post("/tokenize", json=chat)).json()

    models, version, tokens, text, chat = run_served(main)
    assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, 96), ("alias", 96)]
    assert version["version"]
    assert (tokens["tokens"], tokens["count"]) == (ids_of("hé"), 3)
    assert tokens["token_strs"][0] == "h"
    assert text == {"prompt": "hé"}
    assert chat["tokens"] == [257, *ids_of("hé"), 256]


def test_an_answer_is_named_as_the_client_wishes() -> None:
    async def main(served: Running) -> Any:
        return await served.complete(prompt=PROMPT, max_tokens=1, request_id="mine", model="alias")

    answer = run_served(main)
    assert (answer["id"], answer["model"]) == ("cmpl-mine", "alias")
