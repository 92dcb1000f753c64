import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from validation_http_server import (
    MS,
    THREE,
    Drop,
    Script,
    Status,
    choice,
    event,
    pieces,
    prompts_of,
    serving,
    tokens_one_by_one,
    trace_of,
    usage,
)

from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.tokens import token_times
from pagedserve.traces.trace import Trace
from pagedserve.validation.http_replay import replay_url, send_all
from pagedserve.validation.http_stream import Reply


def replayed(script: Script, trace: Trace = THREE, **options: Any) -> RunRecord:
    with serving(script) as server:
        return replay_url(trace, server.url, prompts=prompts_of(trace), **options)


def column(record: RunRecord, name: str) -> list[Any]:
    return record.requests.column(name).to_pylist()


def test_a_trace_is_sent_as_it_is() -> None:
    with serving() as server:
        replay_url(THREE, server.url + "/v1/", prompts=prompts_of(THREE), api_key="secret")
    by_prompt = sorted(server.bodies, key=lambda body: body["prompt"])
    assert [body["prompt"] for body in by_prompt] == [[0, 7, 7, 7], [1, 7], [2, 7, 7]]
    assert [body["max_tokens"] for body in by_prompt] == [3, 1, 5]
    assert [body["min_tokens"] for body in by_prompt] == [3, 1, 5]
    assert by_prompt[0] == {
        "model": "tiny",
        "prompt": [0, 7, 7, 7],
        "max_tokens": 3,
        "min_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert {headers["accept-encoding"] for headers in server.headers} == {"identity"}


def test_the_record_holds_what_a_client_sees() -> None:
    trace = replace(THREE, tenant=np.array(["a", "b", "a"], object), priority=np.array([0, 1, 2]))
    done: list[tuple[int, int]] = []
    record = replayed(tokens_one_by_one, trace, progress=lambda *counts: done.append(counts))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert record.header["kind"] == "client"
    assert record.header["trace"]["sha256"] == trace.sha256()
    assert record.header["device"]["model"] == "tiny"
    assert column(record, "due_ns") == [5 * MS, 5 * MS, 20 * MS]
    assert column(record, "num_output_tokens") == [3, 1, 5]
    assert column(record, "finish_reason") == ["length"] * 3
    assert column(record, "error") == [None] * 3
    assert column(record, "tenant") == ["a", "b", "a"]
    assert column(record, "priority") == [0, 1, 2]
    for name in ("first_schedule_ns", "num_preemptions", "num_prefix_hit_tokens", "num_recomputed_tokens"):
        assert column(record, name) == [None] * 3, name
    tokens = token_times(record)
    for row, (arrival, finish) in enumerate(
        zip(column(record, "arrival_ns"), column(record, "finish_ns"), strict=True)
    ):
        times = tokens.time_ns[tokens.offsets[row] : tokens.offsets[row + 1]]
        assert arrival < times[0]
        assert times[-1] <= finish
    counters = record.header["counters"]
    assert counters["num_usage_tokens"] == counters["num_chunks"] == 9
    assert [counters[name] for name in counters if name.startswith(("num_requests", "num_f", "num_o"))] == [
        0
    ] * 4


def test_no_request_goes_before_it_is_due_and_lag_is_counted() -> None:
    trace = trace_of(*((index, 1, 1) for index in range(40)))
    record = replayed(tokens_one_by_one, trace)
    lag = record.array("requests", "arrival_ns") - record.array("requests", "due_ns")
    assert lag.min() >= 0
    assert record.header["counters"]["send_lag_max_ns"] == lag.max()
    assert record.header["counters"]["send_lag_p50_ns"] == round(float(np.median(lag)))


def test_a_client_that_is_too_busy_says_so() -> None:
    def hold_up(num_ended: int, num_requests: int) -> None:
        time.sleep(0.2)

    counters = replayed(tokens_one_by_one, progress=hold_up).header["counters"]
    assert counters["client_stall_max_ns"] > 150 * MS


def test_open_loop_no_request_waits_for_another() -> None:
    """The server answers nobody before all have come: more than any default limit on connections."""
    count = 130
    everyone = threading.Barrier(count)

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        everyone.wait(60)
        return tokens_one_by_one(body)

    record = replayed(script, trace_of(*((0, 1, 2) for _ in range(count))), timeout_s=60)
    assert column(record, "error") == [None] * count


class PatientClient:
    """Answers after all have been sent; its time stands still but for `sleep`."""

    def __init__(self, num_requests: int) -> None:
        self.now_ns = 1000
        self.sent: list[tuple[bytes, int]] = []
        self._all_sent = asyncio.Event()
        self._num_requests = num_requests

    def clock(self) -> int:
        return self.now_ns

    async def sleep(self, delay_s: float) -> None:
        await REAL_SLEEP(0)  # whatever can go on does so before time does
        self.now_ns += round(delay_s * 1e9)

    async def complete(self, body: bytes) -> Reply:
        self.sent.append((body, self.now_ns))
        if len(self.sent) == self._num_requests:
            self._all_sent.set()
        await self._all_sent.wait()
        return Reply(self.sent[-1][1], self.now_ns, (), "stop", str(body))


REAL_SLEEP = asyncio.sleep


def test_requests_leave_at_their_times_to_the_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    due = [50, 50, 51, 7_000_050, 7_000_050]
    bodies = [bytes([index]) for index in range(len(due))]

    async def run() -> tuple[PatientClient, tuple[int, list[Reply]]]:
        client: Any = PatientClient(len(due))
        monkeypatch.setattr(asyncio, "sleep", client.sleep)
        return client, await send_all(client, bodies, due, client.clock)

    client, (start_ns, replies) = asyncio.run(run())
    assert start_ns == 950, "the first is due at once"
    assert client.sent == [(body, start_ns + at) for body, at in zip(bodies, due, strict=True)]
    assert [reply.error for reply in replies] == [str(body) for body in bodies]


def slow(body: dict[str, Any]) -> Iterator[bytes]:
    yield choice("a", usage=1)
    time.sleep(20)


def dropped(body: dict[str, Any]) -> Iterator[bytes]:
    yield choice("a", usage=1)
    yield choice("b", usage=2)
    raise Drop


def unanswered(body: dict[str, Any]) -> Iterator[bytes]:
    raise Drop


ENDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, int]] = {
    # how the second of three requests is answered, words of its error, the tokens that came
    "an HTTP error": (
        lambda _: Status(503, {"error": {"message": "over\nloaded"}}),
        "HTTP 503: over loaded",
        0,
    ),
    "an HTTP error in plain text": (lambda _: Status(502, b"bad gateway"), "HTTP 502: bad gateway", 0),
    "an HTTP error without a word": (lambda _: Status(500), "HTTP 500: Internal Server Error", 0),
    "no stream": (lambda _: Status(200, {"choices": [{"text": "a"}]}), "found application/json", 0),
    "a lost connection": (dropped, "RemoteProtocolError", 2),
    "no answer at all": (unanswered, "RemoteProtocolError", 0),
    "no end in time": (slow, "timed out after 2 s", 1),
    "bad events": (pieces(choice("a", usage=1), b"data: {\n\n"), "not JSON: {", 1),
    "an error event": (
        pieces(choice("a", usage=1), event({"error": {"message": "died"}})),
        "reports: died",
        1,
    ),
    "an end in the middle": (pieces(choice("a", usage=1)), "without a finish_reason", 1),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_request_that_fails_has_its_row_and_the_others_go_on(how: str) -> None:
    bad, words, num_tokens = ENDS[how]

    def script(body: dict[str, Any]) -> Any:
        return bad(body) if body["prompt"][0] == 1 else tokens_one_by_one(body)

    record = replayed(script, timeout_s=2 if bad is slow else 60)
    assert column(record, "finish_reason") == ["length", "error", "length"]
    assert column(record, "num_output_tokens") == [3, num_tokens, 5]
    before, error, after = column(record, "error")
    assert before is after is None
    assert words in error
    assert "\n" not in error
    assert column(record, "finish_ns")[1] >= column(record, "arrival_ns")[1]
    assert record.header["counters"]["num_failed"] == 1


def test_the_last_event_may_lack_its_blank_line() -> None:
    script = pieces(choice("a", usage=1), choice("b", "length", usage=2).rstrip())
    record = replayed(script, trace_of((0, 1, 2)))
    assert column(record, "finish_reason") == ["length"]
    assert column(record, "num_output_tokens") == [2]


def test_tokens_that_share_a_chunk_share_its_time() -> None:
    script = pieces(choice("abc", usage=3), choice("d", "length", usage=4), usage(4))
    record = replayed(script, trace_of((0, 1, 4)))
    times = token_times(record).time_ns
    assert times[0] == times[1] == times[2] < times[3]
    assert record.header["counters"]["num_chunks"] == 2
    assert record.header["counters"]["num_usage_tokens"] == 4


def test_what_the_server_did_not_state_is_counted_in_the_header() -> None:
    answers = {
        0: [choice("ab"), choice("c", "length"), usage(3)],
        1: [choice("a", "stop")],
        2: [choice("a", "stop"), usage(1, prompt_tokens_details={"cached_tokens": 2})],
    }
    record = replayed(lambda body: iter(answers[body["prompt"][0]]), extensions=False)
    assert column(record, "num_output_tokens") == [3, 1, 1]
    assert column(record, "num_prefix_hit_tokens") == [None, None, 2]
    counters = record.header["counters"]
    assert (counters["num_requests_spread"], counters["num_requests_assumed"]) == (1, 1)
    assert counters["num_other_lengths"] == 1, "the third should have had 5 tokens"


def test_prompts_may_be_made_when_asked_for() -> None:
    with serving() as server:
        replay_url(THREE, server.url, prompts=lambda index: [index + 1] * int(THREE.num_prompt_tokens[index]))
    assert sorted(server.asked("prompt")) == [[1] * 4, [2] * 2, [3] * 3]


def test_prompts_that_are_not_the_trace_s() -> None:
    with serving() as server:
        with pytest.raises(ValueError, match="2 prompts for a trace of 3 requests"):
            replay_url(THREE, server.url, prompts=[[1], [2]])
        with pytest.raises(ValueError, match="request 1 has 3 tokens; the trace says 2"):
            replay_url(THREE, server.url, prompts=[[1] * 4, [1] * 3, [1] * 3])
        with pytest.raises(ValueError, match="timeout_s is 0"):
            replay_url(THREE, server.url, prompts=prompts_of(THREE), timeout_s=0)
        with pytest.raises(ValueError, match="no requests"):
            replay_url(THREE[:0], server.url, prompts=[])
    assert server.bodies == []


def test_where_an_event_loop_runs_already_as_in_a_notebook() -> None:
    async def cell() -> RunRecord:
        return replayed(tokens_one_by_one)

    assert column(asyncio.run(cell()), "finish_reason") == ["length"] * 3
