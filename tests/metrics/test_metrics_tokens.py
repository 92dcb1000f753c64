import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_hand_records import MS, hand_record
from metrics_toy_runs import toy_record

from pagedserve.metrics.record import RecordError, RunRecord
from pagedserve.metrics.tokens import inter_token_s, request_times, token_times


def steps_ms(*rows: tuple[int, int, int]) -> list[dict[str, int]]:
    """Steps from (schedule, commit) in ms and the size of the decode group."""
    return [{"schedule_ns": s * MS, "commit_ns": c * MS, "num_decode_tokens": d} for s, c, d in rows]


def times_ms(record: RunRecord) -> list[list[int]]:
    tokens = token_times(record)
    return [(tokens.time_ns[a:b] // MS).tolist() for a, b in itertools.pairwise(tokens.offsets)]


def test_a_run_skips_steps_that_only_prefill() -> None:
    steps = steps_ms((0, 10, 0), (10, 20, 1), (20, 40, 0), (40, 45, 0), (45, 50, 2))
    requests = [{"request": 0, "num_output_tokens": 3}, {"request": 1, "num_output_tokens": 2}]
    record = hand_record(steps, requests, [(1, 2, 2), (0, 0, 3)])
    assert times_ms(record) == [[10, 20, 50], [40, 50]]


def test_a_preempted_request_continues_with_a_second_run() -> None:
    # Request 0: token at 10, decodes at 20, is preempted, computed again in step 3, decodes at 50.
    steps = steps_ms((0, 10, 0), (10, 20, 1), (20, 30, 1), (30, 40, 1), (40, 50, 2))
    requests = [{"request": 0, "num_output_tokens": 4, "num_preemptions": 1}]
    record = hand_record(steps, requests, [(0, 3, 2), (0, 0, 2)])
    assert times_ms(record) == [[10, 20, 40, 50]]
    tokens = token_times(record)
    assert (inter_token_s(tokens) * 1e3).tolist() == [10, 20, 10]
    assert request_times(record, tokens).itl_max_s.tolist() == [0.02]


def test_tokens_come_at_commit_whatever_the_overlap() -> None:
    # Depth 1: step k + 1 is scheduled before step k commits.
    steps = steps_ms((0, 10, 0), (1, 20, 1), (11, 30, 1))
    record = hand_record(steps, [{"request": 4, "num_output_tokens": 3}], [(4, 0, 3)], overlap_depth=1)
    assert times_ms(record) == [[10, 20, 30]]


def test_two_runs_side_by_side_give_two_tokens_a_step() -> None:
    steps = steps_ms((0, 10, 1), (10, 20, 1), (20, 30, 1))
    record = hand_record(steps, [{"request": 0, "num_output_tokens": 5}], [(0, 0, 3), (0, 1, 2)])
    assert times_ms(record) == [[10, 20, 20, 30, 30]]
    assert (inter_token_s(token_times(record)) * 1e3).tolist() == [10, 0, 10, 0]


def test_each_time_of_a_request_by_hand() -> None:
    steps = steps_ms((0, 10, 0), (10, 20, 1), (20, 40, 1), (40, 50, 1))
    requests = [
        {"request": 3, "arrival_ns": -5 * MS, "first_schedule_ns": 0, "num_output_tokens": 4},
        {"request": 1, "arrival_ns": 15 * MS, "first_schedule_ns": 20 * MS, "num_output_tokens": 1},
        {"request": 2, "first_schedule_ns": 0, "num_output_tokens": 2, "finish_reason": "abort"},
        {"request": 0, "first_schedule_ns": 10 * MS, "num_output_tokens": 0, "finish_reason": "timeout"},
        {"request": 9, "finish_reason": "refused"},
    ]
    record = hand_record(steps, requests, [(3, 0, 4), (1, 2, 1), (2, 0, 2)])
    times = request_times(record, token_times(record))
    nan = math.nan
    expected = {
        "ttft_s": [15, 25, 10, nan, nan],
        "itl_max_s": [20, nan, 10, nan, nan],
        "tpot_s": [40 / 3, nan, nan, nan, nan],
        "e2e_s": [55, 25, nan, nan, nan],
        "queue_time_s": [5, 5, 0, 10, nan],
    }
    for name, milliseconds in expected.items():
        np.testing.assert_allclose(getattr(times, name) * 1e3, milliseconds, rtol=1e-12, err_msg=name)
    assert times.finished.tolist() == [True, True, False, False, False]


def test_nanoseconds_survive_clocks_that_count_from_1970() -> None:
    start = 1_700_000_000_123_456_789
    steps = [{"schedule_ns": start, "commit_ns": start + 1, "num_decode_tokens": 1}]
    requests = [{"request": 0, "arrival_ns": start - 1, "num_output_tokens": 1, "first_schedule_ns": start}]
    record = hand_record(steps, requests, [(0, 0, 1)])
    times = request_times(record, token_times(record))
    assert times.ttft_s.tolist() == [2e-9]
    assert times.queue_time_s.tolist() == [1e-9]


def test_an_empty_record_has_no_tokens() -> None:
    record = hand_record([], [], [])
    tokens = token_times(record)
    assert (tokens.request.size, tokens.time_ns.size, tokens.offsets.tolist()) == (0, 0, [0])
    assert inter_token_s(tokens).size == 0
    assert request_times(record, tokens).ttft_s.size == 0


ONE = [{"request": 5, "num_output_tokens": 2}]
CONTRADICTIONS = {
    "unknown request": (ONE, [(6, 0, 2)], "emissions: row 0: request 6 is not in the table requests"),
    "request beyond the last": (ONE, [(5, 0, 2), (99, 0, 1)], "row 1: request 99 is not in"),
    "no requests": ([], [(0, 0, 1)], "row 0: request 0 is not in"),
    "unknown step": (ONE, [(5, 7, 2)], "emissions: row 0: step 7 is not in the table steps"),
    "run too long": (ONE, [(5, 1, 3)], "row 0: 3 tokens from step 1 on; expected 1 to 2"),
    "run of none": (ONE, [(5, 0, 0)], "row 0: 0 tokens from step 0 on; expected 1 to 3"),
    "tokens missing": (
        ONE,
        [(5, 0, 1)],
        "request 5: num_output_tokens is 2, but its emissions hold 1 tokens",
    ),
    "request twice": ([*ONE, *ONE], [(5, 0, 2)], "request 5 has more than one row"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_record_that_contradicts_itself_is_refused(case: str) -> None:
    requests, emissions, message = CONTRADICTIONS[case]
    steps = steps_ms((0, 10, 1), (10, 20, 1), (20, 30, 0), (30, 40, 1))
    with pytest.raises(RecordError) as refusal:
        token_times(hand_record(steps, requests, emissions))
    assert message in str(refusal.value)


def test_steps_out_of_order_are_refused() -> None:
    steps = [{"step": 2}, {"step": 1}]
    with pytest.raises(RecordError, match="strictly increasing"):
        token_times(hand_record(steps, [], []))


def expanded_naively(record: RunRecord) -> list[tuple[int, int]]:
    """(request row, time) of every token, one at a time, as the definition reads."""
    steps, emissions = record.steps.to_pylist(), record.emissions.to_pylist()
    row_of = {request: row for row, request in enumerate(record.requests.column("request").to_pylist())}
    found = []
    for run in emissions:
        at = next(i for i, step in enumerate(steps) if step["step"] == run["first_step"])
        found.append((row_of[run["request"]], steps[at]["commit_ns"]))
        left = run["num_steps"] - 1
        while left:
            at += 1
            if steps[at]["num_decode_tokens"] > 0:
                found.append((row_of[run["request"]], steps[at]["commit_ns"]))
                left -= 1
    return sorted(found)


@st.composite
def any_records(draw: st.DrawFn) -> RunRecord:
    """Any steps, any runs that fit in them, numbers with gaps, rows in any order."""
    decodes = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    commit, number, steps = 0, draw(st.integers(0, 5)), []
    for size in decodes:
        commit += draw(st.integers(0, 3))
        number += draw(st.integers(1, 2))
        steps.append({"step": number, "commit_ns": commit, "num_decode_tokens": size})
    ids = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True))
    runs = []
    for _ in range(draw(st.integers(0, 8))):
        first = draw(st.integers(0, len(steps) - 1))
        most = 1 + sum(size > 0 for size in decodes[first + 1 :])
        runs.append((draw(st.sampled_from(ids)), steps[first]["step"], draw(st.integers(1, most))))
    counts = {i: sum(count for request, _, count in runs if request == i) for i in ids}
    return hand_record(steps, [{"request": i, "num_output_tokens": counts[i]} for i in ids], runs)


@given(any_records())
def test_expansion_equals_a_loop_over_tokens(record: RunRecord) -> None:
    tokens = token_times(record)
    assert list(zip(tokens.request.tolist(), tokens.time_ns.tolist(), strict=True)) == expanded_naively(
        record
    )
    for row, (begin, end) in enumerate(zip(tokens.offsets, tokens.offsets[1:], strict=False)):
        assert (tokens.request[begin:end] == row).all()
    assert tokens.offsets[-1] == tokens.time_ns.size


@given(any_records())
def test_request_times_equal_a_loop_over_requests(record: RunRecord) -> None:
    tokens = token_times(record)
    times = request_times(record, tokens)
    pooled = []
    for row in range(record.requests.num_rows):
        mine = [time for request, time in expanded_naively(record) if request == row]
        gaps = [b - a for a, b in itertools.pairwise(mine)]
        pooled += gaps
        checks = {
            "ttft_s": mine[0] if mine else None,
            "e2e_s": mine[-1] if mine else None,
            "itl_max_s": max(gaps) if gaps else None,
            "tpot_s": sum(gaps) / len(gaps) if gaps else None,
        }
        for name, expected in checks.items():
            value = getattr(times, name)[row]
            assert math.isnan(value) if expected is None else math.isclose(value, expected / 1e9), name
    np.testing.assert_allclose(inter_token_s(tokens), np.array(pooled) / 1e9)


def test_a_lifelike_run_with_preemptions_expands_like_the_loop() -> None:
    record = toy_record(num_requests=40, rate=10, num_blocks=110)
    assert record.array("requests", "num_preemptions").sum() > 0
    tokens = token_times(record)
    assert list(zip(tokens.request.tolist(), tokens.time_ns.tolist(), strict=True)) == expanded_naively(
        record
    )
