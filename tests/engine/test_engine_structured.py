"""Structured output: whatever the model wants, what comes out has the form that was asked for."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from engine_models import (
    EOS,
    assert_drained,
    drain,
    engine_of,
    ids_of,
    run_all,
    scripted,
    small_limits,
    vocabulary,
)
from engine_rules import PreemptAtRandom

from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.grammar import GrammarCompiler, GrammarError, num_words
from pagedserve.engine.structured_outputs import StructuredOutputs
from pagedserve.policy import Policy, policy

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"[ab]{2,6}-\d{3}"},
    "choice": {"choice": ["yes", "no", 'a "quoted" é\n']},
    "json": {"json": SCHEMA},
    "json text": {"json": json.dumps(SCHEMA)},
    "grammar": {"grammar": 'start: "<" (/[a-c]/ | start) ">"'},
}


def texts(count: int) -> list[list[int]]:
    """Prompts that end with a whole character."""
    return [ids_of(f"prompt {index} " * (1 + index % 3)) for index in range(count)]


def asked(form: dict[str, Any], seed: int = 0, **options: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 80, "seed": seed, **options}
    return SamplingParams(**given, structured_outputs=StructuredOutputs(**form))


def fits(name: str, text: str) -> bool:
    if name == "regex":
        return re.fullmatch(FORMS[name]["regex"], text) is not None
    if name == "choice":
        return text in FORMS[name]["choice"]
    if name == "grammar":
        depth = text.count("<")
        return re.fullmatch(rf"<{{{depth}}}[a-c]>{{{depth}}}", text) is not None
    made = json.loads(text)
    return set(made) == {"name", "age"} and len(made["name"]) <= 5 and 0 <= made["age"] <= 99


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", FORMS)
def test_every_output_has_its_form_and_ends_with_it(name: str, depth: int) -> None:
    """A random model would write noise; with temperature, several seeds, and neighbours without a form."""
    params = [asked(FORMS[name], seed) for seed in range(6)]
    params += [SamplingParams(max_tokens=20, ignore_eos=True, seed=seed) for seed in range(2)]
    # A grammar that may nest for ever is held back by what closes it.
    if name == "grammar":
        bias = {ids_of(">")[0]: 5.0, **{ids_of(c)[0]: 5.0 for c in "abc"}}
        params = [asked(FORMS[name], seed, logit_bias=bias) for seed in range(6)] + params[6:]
    with engine_of("mixed", small_limits(num_blocks=200), depth=depth) as engine:
        made = run_all(engine, texts(8), params)
    for completion in made[:6]:
        assert completion.finish_reason == "stop", completion
        assert fits(name, completion.text), completion.text
    assert len({completion.text for completion in made[:6]}) > 1
    assert [completion.finish_reason for completion in made[6:]] == ["length"] * 2


@pytest.mark.parametrize(
    "spec",
    [
        policy("serial"),
        policy("vllm_v1"),
        Policy(batching=PreemptAtRandom(3, 0.1), enable_prefix_caching=True),
    ],
)
def test_the_schedule_does_not_matter(spec: Policy) -> None:
    """Preempted, recomputed, among others or alone: the same text."""
    names = ["regex", "choice", "json"]
    params = [asked(FORMS[name], 5 + i) for i, name in enumerate(names)]
    alone = []
    for text, own in zip(texts(3), params, strict=True):
        with engine_of("serial") as engine:
            alone.append(run_all(engine, [text], own)[0].token_ids)
    with engine_of(spec, small_limits(num_blocks=40), depth=1) as engine:
        together = run_all(engine, texts(5), [*params, SamplingParams(), SamplingParams()])
    assert [completion.token_ids for completion in together[:3]] == alone


def test_greedy_is_the_likeliest_of_what_fits() -> None:
    """The model wants "maybe" and then "no"; only the second is a choice."""
    with engine_of() as engine, scripted(engine, lambda request: ids_of("nnnnn")):
        (made,) = run_all(engine, [ids_of("ab")], asked(FORMS["choice"], temperature=0.0))
    assert (made.text, made.finish_reason, made.stop) == ("no", "stop", None)
    assert len(made.token_ids) == 2, "it ends with its last token, not with an end mark after it"


def test_an_end_mark_may_come_where_the_form_may_end() -> None:
    """Digits may go on or end: the model's own end mark ends them, also under ignore_eos, and no sooner."""
    script = [EOS, *ids_of("12"), EOS, *ids_of("34")]
    for ignore_eos in (False, True):
        with engine_of() as engine, scripted(engine, lambda request: script):
            params = asked({"regex": r"\d+"}, temperature=0.0, ignore_eos=ignore_eos)
            (made,) = run_all(engine, [ids_of("ab")], params)
        assert re.fullmatch(r"\d12", made.text), made.text
        assert made.finish_reason == "stop"


def test_max_tokens_and_stop_strings_still_end_it() -> None:
    with engine_of() as engine, scripted(engine, lambda request: ids_of("ababab-123")):
        short, stopped = run_all(
            engine,
            texts(2),
            [
                asked(FORMS["regex"], temperature=0.0, max_tokens=4),
                asked(FORMS["regex"], temperature=0.0, stop="ba"),
            ],
        )
    assert (short.text, short.finish_reason) == ("abab", "length")
    assert (stopped.text, stopped.finish_reason, stopped.stop) == ("a", "stop", "ba")


def test_samples_have_grammars_of_their_own() -> None:
    with engine_of(depth=1) as engine:
        states = engine.submit(ids_of("abc"), asked(FORMS["regex"], n=5))
        drain(engine)
        assert_drained(engine)
    texts = [state.completion().text for state in states]
    assert all(fits("regex", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(a"}, "structured_outputs.regex cannot be used: .*unclosed group"),
        ({"json": '{"type": "wat"}'}, "structured_outputs.json cannot be used: .*wat"),
        ({"json": "{"}, "structured_outputs cannot be used"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar cannot be used: .*missing"),
        ({"regex": "(" + "a?" * 400 + "){400}" * 8}, "structured_outputs.regex cannot be used"),
    ],
)
def test_a_form_that_is_none_is_refused_at_once(form: dict[str, Any], words: str) -> None:
    with engine_of() as engine:
        with pytest.raises(GrammarError, match=words):
            engine.submit([1], asked(form))
        assert engine.num_live == 0
        assert_drained(engine)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "has none; give exactly one"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice; give exactly one"),
        ({"choice": "yes"}, "choice is a single text"),
        ({"choice": ["a", ""]}, r"choice\[1\] is ''"),
        ({"choice": ["a"] * 1025}, "1025 texts"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": 5}, "regex is 5; it must be text"),
        ({"regex": "a" * 70_000}, "70000 characters"),
        ({"json": [1]}, "json is list"),
        ({"json": {"a": object()}}, "json is no JSON"),
        ({"json_object": 1}, "json_object is 1"),
    ],
)
def test_a_form_is_checked_when_it_is_made(form: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**form)


def test_min_tokens_beside_a_form_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens is 2 beside structured_outputs"):
        asked(FORMS["regex"], min_tokens=2)


def test_a_grammar_that_gives_up_fails_its_own_request_alone() -> None:
    """A token that does not fit, forced past the mask, leaves the grammar in error: that request ends with it."""
    with engine_of() as engine:
        (bad,) = engine.submit(ids_of("ab"), asked(FORMS["regex"]))
        (good,) = engine.submit(ids_of("cd"), asked(FORMS["regex"], seed=3))
        assert bad.sequence.grammar is not None
        bad.sequence.grammar.accept(ids_of("Z")[0])
        drain(engine)
        assert_drained(engine)
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "its grammar cannot go on" in bad.error
    assert fits("regex", good.completion().text)


def test_compiled_grammars_are_kept_and_bounded() -> None:
    words = vocabulary()
    compiler = GrammarCompiler(words.size, words.eos_token_ids, words.pieces)
    first = compiler.compile(StructuredOutputs(regex="a1"))
    first.accept(ids_of("a")[0])
    again = compiler.compile(StructuredOutputs(regex="a1"))  # the beginning, not where the first one is
    row = np.zeros(num_words(words.size), dtype=np.int32)
    assert again.fill(row) is None
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == ids_of("a")
    for index in range(200):
        compiler.compile(StructuredOutputs(regex=f"b{index}"))
    assert len(compiler._compiled) == 64


def test_a_model_without_an_end_mark_says_so() -> None:
    words = vocabulary()
    endless = Vocabulary(words.size, frozenset(), words.pieces, words.encode)
    with (
        engine_of(vocab=endless) as engine,
        pytest.raises(ValueError, match="need a model with an end-of-text"),
    ):
        engine.submit([1], asked(FORMS["regex"]))


def test_json_has_room_to_indent_and_no_more() -> None:
    """A model that loves white space cannot pad for ever."""
    space = ids_of(" ")[0]
    rng = random.Random(1)
    with engine_of(limits=small_limits(num_blocks=200)) as engine:
        params = [
            asked(
                {"json_object": True},
                rng.randrange(1000),
                logit_bias={space: 60.0, ids_of("}")[0]: 20.0},
                max_tokens=80,
            )
            for _ in range(4)
        ]
        made = run_all(engine, texts(4), params)
    assert all(completion.finish_reason == "stop" for completion in made)
    assert all(json.loads(completion.text) is not None for completion in made)
