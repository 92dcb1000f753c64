"""Stop strings against a brute-force search; stop ids under min_tokens and ignore_eos (CASES S4, T2)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.stops import StopMatcherState, TextDelta, TokenStops

stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
chunk_lists = st.lists(st.text("abc", max_size=4), max_size=12)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the earliest completed stop ends, and which it is; ties by list order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def live_prefix_length(text: str, stops: list[str]) -> int:
    """How much of the text's end is a proper prefix of some stop."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


@settings(max_examples=500, deadline=None)
@given(stop_lists, chunk_lists, st.booleans())
def test_text_in_any_pieces_is_cut_where_brute_force_cuts_it(stops, chunks, include):
    matcher = StopMatcherState(stops, include_stop=include)
    text, sent = "", ""
    for chunk in chunks:
        text += chunk
        delta = matcher.push(chunk)
        sent += delta.text
        expected = first_stop(text, stops)
        if expected is not None:
            end, stop = expected
            assert delta.stop == stop
            assert sent == (text[:end] if include else text[: end - len(stop)])
            assert matcher.finish() == ""
            return
        assert delta.stop is None
        assert sent == text[: len(text) - live_prefix_length(text, stops)]
    assert sent + matcher.finish() == text
    assert matcher.finish() == ""


@settings(max_examples=300, deadline=None)
@given(stop_lists, chunk_lists, st.integers(0, 12))
def test_before_it_may_stop_a_stop_is_plain_text(stops, chunks, num_protected):
    """A stop that began in the protected text counts if it is completed behind it."""
    matcher = StopMatcherState(stops)
    text, sent, stop, protected = "", "", None, 0
    for index, chunk in enumerate(chunks):
        may_stop = index >= num_protected
        text += chunk
        protected = protected if may_stop else len(text)
        delta = matcher.push(chunk, may_stop=may_stop)
        sent += delta.text
        if delta.stop is not None:
            stop = delta.stop
            break
        assert sent == text[: len(text) - live_prefix_length(text, stops)]
    ends = ((end, s) for end in range(protected + 1, len(text) + 1) for s in stops if text[:end].endswith(s))
    expected = next(ends, None)
    assert (None if expected is None else expected[1]) == stop
    if expected is not None:
        assert sent == text[: expected[0] - len(expected[1])]


def test_a_stop_that_comes_letter_by_letter_never_leaks():
    """CASES T2: DEFGHIJ must not leak DEF."""
    matcher = StopMatcherState(["DEFGHIJ"])
    deltas = [matcher.push(char) for char in "ABCDEFGHIJ"]
    assert [delta.text for delta in deltas] == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert [delta.stop for delta in deltas] == [None] * 9 + ["DEFGHIJ"]


def test_text_that_is_no_prefix_of_a_stop_is_not_delayed():
    """CASES T2: no fixed hold-back, and what was held comes out as soon as it is no prefix any more."""
    matcher = StopMatcherState(["a very long stop string", "XY"])
    assert matcher.push("Hello") == TextDelta("Hello")
    assert matcher.push(" X") == TextDelta(" ")
    assert matcher.push("X") == TextDelta("X")
    assert matcher.push("!") == TextDelta("X!")


def test_the_earliest_end_wins_and_ties_go_by_list_order():
    assert StopMatcherState(["abcdef", "cd"]).push("xabcdefg") == TextDelta("xab", "cd")
    assert StopMatcherState(["b", "ab"]).push("xab") == TextDelta("xa", "b")
    assert StopMatcherState(["ab", "b"]).push("xab") == TextDelta("x", "ab")
    assert StopMatcherState(["ab", "b"], include_stop=True).push("xab!") == TextDelta("xab", "ab")


def test_without_stops_nothing_is_held():
    matcher = StopMatcherState([])
    assert matcher.push("any") == TextDelta("any")
    assert matcher.finish() == ""


def test_text_after_the_stop_is_a_bug():
    matcher = StopMatcherState(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError, match="text after the stop"):
        matcher.push("b")


def test_stop_ids_count_only_behind_min_tokens():
    stops = TokenStops.for_request(SamplingParams(min_tokens=3, stop_token_ids=[7]), eos_token_ids=[1, 2])
    assert stops.suppressed_ids == (1, 2, 7)
    for token_id in (1, 2, 7):
        assert [stops.ends_at(token_id, n) for n in (1, 3, 4)] == [False, False, True]
    assert not stops.ends_at(3, 100)


def test_ignore_eos_ignores_every_eos_id_but_not_the_users_own():
    stops = TokenStops.for_request(
        SamplingParams(ignore_eos=True, stop_token_ids=[2, 7]), eos_token_ids=[1, 2, 3]
    )
    assert stops.stop_ids == {2, 7}
    assert stops.suppressed_ids == ()
    assert TokenStops.for_request(SamplingParams(), eos_token_ids=[1, 2]).stop_ids == {1, 2}
