"""Text as it streams out of the engine: whole characters, and stop strings that never show."""

from typing import Any

import pytest
from engine_models import Heard, assert_drained, drain, engine_of, greedy, ids_of, scripted, tokenizer
from engine_rules import PreemptAtRandom

from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import Completion
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import Policy

TEXTS = [
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇺🇳",
    "你好，世界。日本語、한국어",
    "שָׁלוֹם עוֹלָם",
    "Cafe\u0301 nai\u0308ve Z\u0351\u036b\u0343\u036a\u0302",
    "plain\n\ttext  with spaces",
]
DEPTHS = (0, 1)


def stream(engine: Engine, output: str | list[int], params: SamplingParams) -> tuple[Completion, list[str]]:
    """Let the model say ``output``; the completion, and the text of every delta that has any."""
    wanted = ids_of(output) if isinstance(output, str) else output
    heard = Heard()
    with scripted(engine, lambda request: wanted):
        (state,) = engine.submit("Say:", params, heard)
        drain(engine)
    assert_drained(engine)
    completion = state.completion()
    assert heard.text(completion.request) == completion.text
    assert heard.tokens(completion.request) == list(completion.token_ids)
    return completion, [delta.text for delta in heard.deltas if delta.text]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("text", TEXTS)
def test_t1_the_stream_equals_decoding_all_at_once(text: str, depth: int) -> None:
    """T1: every byte is a token of its own, and no delta holds a piece of a character; preempted or not."""
    for spec in (Policy(), Policy(batching=PreemptAtRandom(3, 0.1))):
        with engine_of(spec, depth=depth) as engine:
            completion, deltas = stream(engine, text, greedy(len(ids_of(text))))
        assert completion.text == text == tokenizer().decode(list(completion.token_ids))
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(deltas)
        assert len(deltas) == len(text), "one delta for each character"


@pytest.mark.parametrize("depth", DEPTHS)
def test_t1_an_incomplete_tail_is_flushed_once(depth: int) -> None:
    """T1: the limit falls inside a character: one U+FFFD, with the end."""
    wanted = ids_of("a👩")[:3]
    with engine_of(depth=depth) as engine:
        completion, deltas = stream(engine, wanted, greedy(3))
    assert deltas == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert completion.text == tokenizer().decode(wanted)


def test_t1_a_character_begun_in_the_prompt_ends_in_the_output() -> None:
    """T1: the output's first bytes complete the prompt's last character, and add nothing of their own."""
    head, tail = ids_of("é")
    with engine_of() as engine, scripted(engine, lambda request: [tail, *ids_of("x")]):
        (state,) = engine.submit([*ids_of("caf"), head], greedy(2))
        drain(engine)
    assert state.completion().text == tokenizer().decode([head, tail]) + "x"


@pytest.mark.parametrize("depth", DEPTHS)
def test_t2_no_part_of_a_stop_string_leaks(depth: int) -> None:
    """T2: text is held back only while it could become a stop, and the tokens of the stop are counted."""
    with engine_of(depth=depth) as engine:
        completion, deltas = stream(engine, "ABC-DEF.DEFGHIJKL", greedy(40, stop="DEFGHIJ"))
    assert deltas == ["A", "B", "C", "-", "DEF.", *[]]
    assert (completion.text, completion.finish_reason, completion.stop) == ("ABC-DEF.", "stop", "DEFGHIJ")
    assert len(completion.token_ids) == len("ABC-DEF.DEFGHIJ")


@pytest.mark.parametrize(
    ("stops", "options", "text", "stop"),
    [
        (["DEFGHIJ", "EF"], {}, "ABCD", "EF"),
        (["FG", "DEFG"], {}, "ABCDE", "FG"),
        (["DEFG", "FG"], {}, "ABC", "DEFG"),
        (["C", "BCD"], {}, "AB", "C"),
        (["DEFG"], {"include_stop_str_in_output": True}, "ABCDEFG", "DEFG"),
        (["nothing"], {"max_tokens": 4}, "ABCD", None),
        (["DEFX"], {"max_tokens": 5}, "ABCDE", None),
    ],
)
def test_t2_the_earliest_end_wins(
    stops: list[str], options: dict[str, Any], text: str, stop: str | None
) -> None:
    """T2: with several stops the one completed first wins, then the first listed; held text is not lost."""
    with engine_of() as engine:
        completion, _ = stream(engine, "ABCDEFGHIJ", greedy(**{"max_tokens": 10, "stop": stops, **options}))
    assert (completion.text, completion.stop) == (text, stop)
    assert completion.finish_reason == ("length" if stop is None else "stop")


@pytest.mark.parametrize("depth", DEPTHS)
def test_t2_a_stop_survives_preemption(depth: int) -> None:
    """T2: the match goes on where it was when the request is preempted in the middle of it."""
    for seed in range(4):
        with engine_of(Policy(batching=PreemptAtRandom(seed, 0.3)), depth=depth) as engine:
            completion, _ = stream(engine, "abcabcabdXYZ", greedy(20, stop="abcabd"))
            assert engine.scheduler.num_preemptions > 0
        assert (completion.text, len(completion.token_ids)) == ("abc", 9)


@pytest.mark.parametrize("depth", DEPTHS)
def test_t2_aborted_text_is_what_was_sent(depth: int) -> None:
    """An abort in the middle of a possible stop: what was held back comes with the end, and no more."""
    heard = Heard()
    with engine_of(depth=depth) as engine, scripted(engine, lambda request: ids_of("xDEFGHIJ")):
        (state,) = engine.submit("Say:", greedy(20, stop="DEFGHIJ"), heard)
        while len(state.token_ids) < 4:
            engine.step()
        engine.abort(state.sequence.request.id)
        drain(engine)
    completion = state.completion()
    assert (completion.text, completion.finish_reason) == ("xDEF", "abort")
    assert heard.text(completion.request) == "xDEF"
    assert len(completion.token_ids) == 4


def test_t3_an_empty_stop_string_is_refused() -> None:
    """T3: it would end every output at once."""
    with pytest.raises(ValueError, match=r"stop\[1\] is empty"):
        greedy(3, stop=["a", ""])


@pytest.mark.parametrize("depth", DEPTHS)
def test_special_tokens_show_when_asked_for(depth: int) -> None:
    """The end mark is a token like another under ignore_eos; it shows if special tokens are not skipped."""
    wanted = [*ids_of("a"), 257, *ids_of("b")]
    with engine_of(depth=depth) as engine:
        assert stream(engine, wanted, greedy(3))[0].text == "ab"
        assert stream(engine, wanted, greedy(3, skip_special_tokens=False))[0].text == "a<|user|>b"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_scripted_stop_ends_with_its_token(depth: int) -> None:
    """A replay's true length: the request stops with that token, whatever it is, EOS or not."""
    with engine_of(depth=depth) as engine:
        for length in (1, 2, 7):
            states = [engine.submit([1, 2, 3], greedy(20), stop_after=length)[0] for _ in range(3)]
            drain(engine)
            for state in states:
                assert len(state.token_ids) == length
                assert (state.finish_reason, state.stop) == ("stop", None)
        assert_drained(engine)
