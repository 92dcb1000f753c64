"""Replay options: what they do to times, lengths and block ids, and what the report says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.traces import transforms
from pagedserve.traces.blocks import BlockIds
from pagedserve.traces.report import TraceError
from pagedserve.traces.trace import Trace

S = 1_000_000_000


def five(**more: Any) -> Trace:
    return Trace.of(
        "five", [1 * S, 2 * S, 2 * S, 5 * S, 9 * S], [10, 20, 30, 40, 50], [5, 4, 3, 2, 1], **more
    )


def with_blocks() -> Trace:
    # Blocks of 8: 2, 3, 4, 5 and 7 ids. All share block 0; the last two share five blocks.
    rows = [[0, 1], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 5, 6], [0, 2, 3, 5, 6, 7, 8]]
    offsets = np.cumsum([0, *map(len, rows)])
    return five(blocks=BlockIds(8, np.array([i for row in rows for i in row]), offsets))


def test_window_is_half_open_and_keeps_the_clock() -> None:
    trace = transforms.window(five(), 2.0, 5.0)
    assert trace.row.tolist() == [2, 3]
    assert trace.arrival_ns.tolist() == [2 * S, 2 * S]
    (tally,) = trace.report.tallies
    assert (tally.kind, tally.count, [example.row for example in tally.examples]) == ("dropped", 3, [1, 4, 5])
    assert transforms.window(five(), 2.0).row.tolist() == [2, 3, 4, 5]
    assert len(transforms.window(five(), 100.0)) == 0


def test_first() -> None:
    trace = transforms.first(five(), 2)
    assert trace.row.tolist() == [1, 2]
    assert trace.report.count("dropped") == 3
    assert transforms.first(five(), 99).report.tallies == ()


def test_rebase_moves_the_origin_along() -> None:
    trace = transforms.rebase(transforms.window(five(), 2.0))
    assert trace.arrival_ns.tolist() == [0, 0, 3 * S, 7 * S]
    assert trace.report.origin_ns == 2 * S
    assert trace.report.steps == ("window(2, end) s", "rebase: 2000000000 ns earlier")


def test_scale_time_and_rate() -> None:
    assert transforms.scale_time(five(), 0.5).arrival_ns.tolist() == [S // 2, S, S, 5 * S // 2, 9 * S // 2]
    scaled = transforms.with_rate(five(), 2.0)
    assert scaled.describe().rate_per_s == pytest.approx(2.0, rel=1e-8)
    assert scaled.describe().gap_cv == pytest.approx(five().describe().gap_cv, rel=1e-8)
    long = Trace.of("long", [0, 2**53 + 1], [1, 1], [1, 1])
    with pytest.raises(TraceError, match="104 days"):
        transforms.scale_time(long, 0.5)
    with pytest.raises(TraceError, match="two different arrival times"):
        transforms.with_rate(Trace.of("one", [5], [1], [1]), 2.0)


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=30), st.floats(1e-6, 8.0))
def test_scaled_times_stay_in_order(times: list[int], factor: float) -> None:
    trace = Trace.of("t", sorted(times), [1] * len(times), [1] * len(times))
    scaled = transforms.scale_time(trace, factor)
    assert np.abs(scaled.arrival_ns - trace.arrival_ns * factor).max() <= 1


def test_scale_lengths_without_ids() -> None:
    trace = transforms.scale_lengths(five(), 0.25)
    assert trace.num_prompt_tokens.tolist() == [2, 5, 8, 10, 12]  # halves to even
    assert trace.num_output_tokens.tolist() == [1, 1, 1, 1, 1]
    assert trace.report.count("changed") == 2  # 1 * 0.25 and 2 * 0.25 round to 0
    other = transforms.scale_lengths(five(), 2, output_factor=10)
    assert (other.num_prompt_tokens[0], other.num_output_tokens[0]) == (20, 50)


@pytest.mark.parametrize("factor", [0.125, 0.25, 0.5, 1.0, 1.5, 3.0])
def test_scaling_with_ids_scales_the_blocks_and_keeps_the_sharing(factor: float) -> None:
    trace = transforms.scale_lengths(with_blocks(), factor)
    before, after = with_blocks().describe().prefix, trace.describe().prefix
    assert before is not None
    assert after is not None
    assert after.block_size == 8 * factor
    assert (after.num_hit_blocks, after.num_blocks) == (before.num_hit_blocks, before.num_blocks)
    assert after.hit_token_share == pytest.approx(before.hit_token_share, abs=0.05)
    expected = np.ceil(with_blocks().num_prompt_tokens * factor)
    assert trace.num_prompt_tokens.tolist() == expected.astype(int).tolist()


def test_scaling_with_ids_refuses_a_fraction_of_a_token() -> None:
    with pytest.raises(TraceError, match=r"block size 8 x factor 0.3 = 2.4 .* such as 0.25 or 0.375"):
        transforms.scale_lengths(with_blocks(), 0.3)
    trace = transforms.scale_lengths(transforms.without_block_ids(with_blocks()), 0.3)
    assert trace.num_prompt_tokens.tolist() == [3, 6, 9, 12, 15]


def test_clip_shortens_prompt_then_output_and_counts_each() -> None:
    trace = transforms.clip_lengths(five(), max_prompt=35, max_total=33)
    assert trace.num_prompt_tokens.tolist() == [10, 20, 30, 32, 32]
    assert trace.num_output_tokens.tolist() == [5, 4, 3, 1, 1]
    counts = {tally.reason: tally.count for tally in trace.report.tallies}
    assert counts == {
        "the prompt exceeded max_prompt": 2,
        "the prompt exceeded max_total - 1": 2,
        "prompt + output exceeded max_total: output shortened": 1,
    }
    (example, _) = trace.report.tallies[0].examples
    assert (example.file, example.row, example.line, example.value) == ("five", 4, None, "40")
    assert transforms.clip_lengths(five(), 50, 99).report.tallies == ()


def test_clip_may_drop_instead() -> None:
    trace = transforms.clip_lengths(five(), max_prompt=40, max_total=33, mode="drop")
    assert trace.row.tolist() == [1, 2, 3]
    counts = {tally.reason: tally.count for tally in trace.report.tallies}
    assert counts == {"the prompt exceeds max_prompt": 1, "prompt + output exceeds max_total": 1}


def test_clip_cuts_block_ids_with_the_prompt() -> None:
    trace = transforms.clip_lengths(with_blocks(), max_prompt=18)
    assert trace.blocks is not None
    assert [trace.blocks.of(i).tolist() for i in range(5)] == [
        [0, 1],
        [0, 2, 3],
        [0, 2, 3],
        [0, 2, 3],
        [0, 2, 3],
    ]
    prefix = trace.describe().prefix
    assert prefix is not None
    assert prefix.num_hit_tokens == 8 + 3 * 18


@pytest.mark.parametrize(
    "call",
    [
        lambda trace: transforms.window(trace, -1.0),
        lambda trace: transforms.window(trace, 3.0, 3.0),
        lambda trace: transforms.window(trace, float("nan")),
        lambda trace: transforms.first(trace, 0),
        lambda trace: transforms.scale_time(trace, 0.0),
        lambda trace: transforms.scale_time(trace, float("inf")),
        lambda trace: transforms.with_rate(trace, -1.0),
        lambda trace: transforms.scale_lengths(trace, -1.0),
        lambda trace: transforms.scale_lengths(trace, 1e9),
        lambda trace: transforms.clip_lengths(trace, max_prompt=0),
        lambda trace: transforms.clip_lengths(trace, max_total=1),
        lambda trace: transforms.clip_lengths(trace, 5, mode="cut"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_impossible_wishes_are_refused(call: Callable[[Trace], Trace]) -> None:
    with pytest.raises(TraceError):
        call(five())


def test_transforms_leave_the_original_alone() -> None:
    trace = with_blocks()
    digest, report = trace.sha256(), trace.report
    transforms.clip_lengths(transforms.scale_time(transforms.first(trace, 3), 2.0), 9)
    assert trace.sha256() == digest
    assert trace.report is report
