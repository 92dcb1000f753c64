from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from validation_http_server import choice, event, usage

from pagedserve.validation.http_stream import (
    Chunk,
    EventsState,
    Reply,
    ReplyState,
    StreamError,
    error_message,
    shown,
    token_counts,
)


def read(*events: bytes, error: str | None = None) -> Reply:
    """A reply whose event i came at 100 + i; sent at 7, ended at 999."""
    state, parser = ReplyState(7), EventsState()
    for index, one in enumerate(events):
        for data in parser.feed(one):
            state.take(data, 100 + index)
    return state.reply(999, error)


STREAM = (
    b': a comment\ndata: {"text": "\xe2\x80\xa8 \xc2\x85 \x0b"}\n\n'
    b"event: x\r\ndata:one\r\ndata: two\r\n\r\n"
    b"id: 3\rdata:  spaced\r\r"
    b"\n\ndata\ndata:\n\ndata: last"
)
EVENTS = [b'{"text": "\xe2\x80\xa8 \xc2\x85 \x0b"}', b"one\ntwo", b" spaced", b"\n", b"last"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventsState()
    found = [e for a, b in pairwise(edges) for e in parser.feed(STREAM[a:b])]
    assert found == EVENTS[:-1], "the last has no blank line behind it"
    assert parser.close() == EVENTS[-1:]
    assert parser.close() == []


def test_a_carriage_return_waits_for_its_line_feed() -> None:
    parser = EventsState()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n") == [], "CR and LF in two pieces are one line end"
    assert parser.feed(b"\r\n") == [b"a"]


def test_a_reply_as_vllm_streams_it() -> None:
    reply = read(
        choice("", usage=1),  # a token that cannot be shown yet
        choice("é", usage=2),
        choice(" and more", usage=5),
        choice("", "length", usage=5),
        usage(5, prompt_tokens=9, prompt_tokens_details={"cached_tokens": 4}),
        event("[DONE]"),
    )
    assert reply == Reply(7, 103, ((100, 1), (101, 1), (102, 3)), "length", None, 5, 4, "stated")
    assert reply.num_tokens == 5


@pytest.mark.parametrize(
    "counted",
    [
        {"token_ids": [5, 6]},
        {"logprobs": {"tokens": ["a", "b"]}},
        {"token_ids": None, "logprobs": {"tokens": ["a", "b"]}},
    ],
)
def test_a_server_may_count_by_token_ids_or_logprobs(counted: dict[str, Any]) -> None:
    reply = read(choice("ab", **counted), choice("cd", "stop", **counted), usage(4))
    assert (reply.arrivals, reply.counting, reply.finish_reason) == (((100, 2), (101, 2)), "stated", "stop")


def test_a_sum_that_comes_with_the_last_chunk_is_no_running_count() -> None:
    reply = read(choice("a"), choice("b"), choice("", "length", usage=2), event("[DONE]"))
    assert (reply.arrivals, reply.counting) == (((100, 1), (101, 1)), "stated")


CASES: dict[str, tuple[str, int | None, list[int], str]] = {
    # which chunks have text ("x") or not ("."), the stated sum, the counts, how they are known
    "one each": ("xxx", 3, [1, 1, 1], "stated"),
    "the last without text": ("xx.", 2, [1, 1, 0], "stated"),
    "more tokens than chunks": ("xxx", 7, [3, 2, 2], "spread"),
    "chunks without text have no share": (".x.x", 4, [0, 2, 0, 2], "spread"),
    "fewer tokens than chunks": ("xxxx", 2, [1, 0, 1, 0], "spread"),
    "nothing has text": ("...", 3, [1, 1, 1], "stated"),
    "no sum": ("x.x", None, [1, 0, 1], "assumed"),
    "no sum and no text": ("..", None, [0, 0], "assumed"),
    "no token": ("x", 0, [0], "spread"),
    "no chunk": ("", None, [], "stated"),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_chunks_that_the_server_did_not_count(case: str) -> None:
    text, num_tokens, counts, counting = CASES[case]
    chunks = [Chunk(i, mark == "x", None) for i, mark in enumerate(text)]
    assert token_counts(chunks, num_tokens) == (counts, counting)


@given(st.integers(1, 40), st.integers(0, 200))
def test_spreading_keeps_the_sum_and_starts_with_the_first_chunk(num_chunks: int, num_tokens: int) -> None:
    counts, _ = token_counts([Chunk(i, True, None) for i in range(num_chunks)], num_tokens)
    assert sum(counts) == num_tokens
    assert counts[0] == -(-num_tokens // num_chunks)
    assert max(counts) - min(counts) <= 1


FAILURES: dict[str, tuple[bytes, str]] = {
    "an error event": (
        event({"error": {"message": "out of\nmemory", "code": 500}}),
        "reports: out of memory",
    ),
    "an error as text": (event({"error": "out of memory"}), "reports: out of memory"),
    "an older error": (event({"object": "error", "message": "no such model"}), "reports: no such model"),
    "no JSON": (event('{"choices": ['), "not JSON: {"),
    "no object": (event("[1]"), "not an object: [1]"),
    "no list": (event({"choices": {"text": "a"}}), "no list of objects"),
    "no objects": (event({"choices": ["a"]}), "no list of objects"),
    "a falling count": (usage(2) + usage(1), "falls from 2 to 1"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_event_that_is_none_of_ours(case: str) -> None:
    events, words = FAILURES[case]
    with pytest.raises(StreamError, match=words.replace("[", r"\[").replace("{", r"\{")) as failure:
        read(choice("a"), events)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([choice("a", usage=1), event("[DONE]")], "without a finish_reason"),
        ([choice("a", "content_filter", usage=1)], "finish_reason 'content_filter'"),
        ([usage(3), event("[DONE]")], "without a finish_reason"),
    ],
)
def test_an_end_that_is_no_end(events: list[bytes], words: str) -> None:
    reply = read(*events)
    assert (reply.finish_reason, reply.end_ns) == ("error", 999)
    assert reply.error is not None
    assert words in reply.error


def test_a_failure_keeps_what_had_come() -> None:
    reply = read(choice("a"), choice("b"), error="gone")
    assert reply == Reply(7, 999, ((100, 1), (101, 1)), "error", "gone", None, None, "assumed")


def test_messages_of_servers_stay_on_one_short_line() -> None:
    assert error_message({"detail": [{"loc": ["body"]}]}) == '[{"loc": ["body"]}]'
    assert error_message({"message": "plain"}) == error_message(b"pl\xc3\xa4in").replace("ä", "a") == "plain"
    assert len(shown("word " * 1000)) == 200
    assert shown(b"\xff") == "\ufffd"
