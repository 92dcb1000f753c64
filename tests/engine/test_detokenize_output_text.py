"""Tokens to visible text: held text, broken tails, min_tokens and stop tokens together (CASES S4, T1, T2)."""

import pytest
from detokenize_tokenizers import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.engine.detokenize import REPLACEMENT, TokenPieces
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.stops import TextDelta

TOKENIZER = KINDS["byte_level"]
PIECES = TokenPieces(TOKENIZER)
END = TOKENIZER.get_vocab()["<|im_end|>"]


def letters(text: str) -> list[int]:
    """One token per byte, so that positions in tokens and in text are easy to compare."""
    alphabet = {PIECES.piece(i): i for i in range(TOKENIZER.get_vocab_size()) if len(PIECES.piece(i)) == 1}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def run(params: SamplingParams, ids: list[int]) -> tuple[list[str], str | None, int]:
    """Deltas with the final one, the stop found, and the number of tokens taken."""
    state = OutputTextState(params, PIECES)
    deltas = []
    for token_id in ids:
        delta = state.push(token_id)
        deltas.append(delta.text)
        if delta.stop is not None:
            return [*deltas, state.finish()], delta.stop, state.num_tokens
    return [*deltas, state.finish()], None, state.num_tokens


def test_a_stop_ends_at_its_last_token_and_never_leaks():
    deltas, stop, num_tokens = run(SamplingParams(stop=["DEF"]), letters("abcDEFghi"))
    assert (deltas, stop, num_tokens) == (["a", "b", "c", "", "", "", ""], "DEF", 6)


def test_a_stop_may_be_shown():
    params = SamplingParams(stop=["DEF"], include_stop_str_in_output=True)
    deltas, stop, num_tokens = run(params, letters("abcDEFghi"))
    assert ("".join(deltas), stop, num_tokens) == ("abcDEF", "DEF", 6)


def test_held_text_and_a_broken_tail_both_come_out_at_the_end():
    ids = letters("abDE") + letters("👩")[:2]
    deltas, stop, _ = run(SamplingParams(stop=["DEF"]), ids)
    assert stop is None
    assert "".join(deltas) == "abDE" + REPLACEMENT
    deltas, stop, _ = run(SamplingParams(stop=["DEF"]), letters("abDE"))
    assert deltas == ["a", "b", "", "", "DE"]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "a."), (3, "a."), (4, "a..")])
def test_min_tokens_counts_the_tokens_before_the_completing_one(min_tokens, text):
    """CASES S4: with `.` as the stop and "a.....", token min_tokens + 1 is the first that may stop."""
    params = SamplingParams(stop=["."], min_tokens=min_tokens, max_tokens=99)
    deltas, stop, num_tokens = run(params, letters("a....."))
    expected = "a" + "." * max(0, min_tokens - 1)
    assert stop == "."
    assert "".join(deltas) == expected
    assert num_tokens == max(2, min_tokens + 1)
    assert expected.startswith(text)


def test_a_stop_that_began_under_min_tokens_counts_when_completed_later():
    params = SamplingParams(stop=["bcd"], min_tokens=3, max_tokens=9)
    assert run(params, letters("abcde"))[1] == "bcd"
    assert run(params, letters("bcdef"))[1] is None


def test_a_stop_token_shows_only_on_request():
    for shown, text in ((False, "ab"), (True, "ab<|im_end|>")):
        params = SamplingParams(include_stop_str_in_output=shown, skip_special_tokens=False)
        state = OutputTextState(params, PIECES)
        deltas = [state.push(token_id).text for token_id in letters("ab")]
        deltas += [state.push(END, is_stop_token=True).text, state.finish()]
        assert "".join(deltas) == text
        assert state.num_tokens == 3


def test_a_stop_in_the_middle_of_split_characters():
    deltas, stop, num_tokens = run(SamplingParams(stop=["好。"]), letters("你好。吗"))
    assert ("".join(deltas), stop, num_tokens) == ("你", "好。", 9)


def test_after_a_stop_nothing_more_comes():
    state = OutputTextState(SamplingParams(stop=["x"]), PIECES)
    assert state.push(letters("x")[0]) == TextDelta("", "x")
    assert state.finish() == ""
    with pytest.raises(AssertionError, match="after the stop"):
        state.push(letters("y")[0])


@settings(max_examples=200, deadline=None)
@given(st.text("ab你👩", max_size=20), st.lists(st.text("ab你", min_size=1, max_size=3), max_size=3))
def test_the_text_does_not_depend_on_how_tokens_cut_it(text, stops):
    params = SamplingParams(stop=stops)
    by_bytes = run(params, letters(text))
    by_tokens = run(params, TOKENIZER.encode(text).ids)
    assert "".join(by_bytes[0]) == "".join(by_tokens[0])
    assert by_bytes[1] == by_tokens[1]
