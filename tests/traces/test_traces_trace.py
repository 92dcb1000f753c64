"""The trace record: its rules, its digest, its summary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.traces.blocks import BlockIds
from pagedserve.traces.report import TraceError, TraceReport
from pagedserve.traces.trace import Trace

ROOT = Path(__file__).resolve().parents[2]


def small(**more: Any) -> Trace:
    return Trace.of("small", [0, 10, 10, 40], [5, 3, 9, 2], [1, 2, 3, 4], **more)


def with_blocks() -> Trace:
    # Prompts of 5, 3, 9 and 2 tokens in blocks of 4: 2 + 1 + 3 + 1 ids.
    return small(blocks=BlockIds(4, np.array([0, 1, 2, 0, 3, 4, 2]), np.array([0, 2, 3, 6, 7])))


def test_columns_are_copied_and_read_only() -> None:
    arrivals = np.array([0, 10, 10, 40])
    trace = Trace.of("small", arrivals, [5, 3, 9, 2], [1, 2, 3, 4])
    arrivals[1] = 99
    assert trace.arrival_ns.tolist() == [0, 10, 10, 40]
    with pytest.raises(ValueError, match="read-only"):
        trace.num_prompt_tokens[0] = 7
    with pytest.raises(AttributeError):
        trace.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 5, 4], [1, 1, 1], [1, 1, 1]), r"decreases at index 2: 5 then 4"),
        (([-1], [1], [1]), r"arrival_ns at index 0 is -1"),
        (([0], [0], [1]), r"num_prompt_tokens at index 0 is 0"),
        (([0], [1], [0]), r"num_output_tokens at index 0 is 0"),
        (([0], [2**31], [1]), r"num_prompt_tokens at index 0 is 2147483648"),
        (([0], [1.0], [1]), r"num_prompt_tokens must be .* integers, not float64"),
        (([True], [1], [1]), r"arrival_ns must be .* integers, not bool"),
        (([0, 1], [1], [1, 1]), r"num_prompt_tokens has 1 values, but arrival_ns has 2"),
        (([[0]], [1], [1]), r"one-dimensional"),
        ((np.array([2**63], dtype=np.uint64), [1], [1]), r"9223372036854775808, which does not fit"),
    ],
)
def test_bad_columns_are_refused(columns: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace.of("bad", *columns)


@pytest.mark.parametrize("label", [7, "a\nb", "a\rb", "nul\0", "\udcff"])
def test_bad_labels_are_refused(label: Any) -> None:
    with pytest.raises(TraceError, match="tenant at index 1"):
        small(tenant=["a", label, "c", "d"])


@pytest.mark.parametrize(
    ("block_size", "ids", "offsets", "message"),
    [
        (4, [0, 1, 2, 0, 3, 4], [0, 2, 3, 6], "for 3 requests, but there are 4"),
        (
            4,
            [0, 1, 2, 0, 3, 2],
            [0, 2, 3, 5, 6],
            "index 2 has 2 block ids, but its 9 prompt tokens fill 3 blocks",
        ),
        (4, [0, 1, 2, 0, 3, 4, 3], [0, 2, 3, 6, 7], "block id 3 follows different ids"),
        (4, [0, 1, 2, 0, 3, 4, -2], [0, 2, 3, 6, 7], "at least 0, but one is -2"),
        (4, [0, 1, 2, 0, 3, 4, 2], [0, 2, 3, 6, 8], "offsets must rise"),
        (0, [0, 1, 2, 0, 3, 4, 2], [0, 2, 3, 6, 7], "block_size must be 1"),
    ],
)
def test_bad_block_ids_are_refused(block_size: int, ids: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        small(blocks=BlockIds(block_size, np.array(ids), np.array(offsets)))


def test_slices_keep_rows_blocks_and_times() -> None:
    trace = with_blocks()[1:4:2]
    assert trace.arrival_ns.tolist() == [10, 40]
    assert trace.row.tolist() == [2, 4]
    assert trace.blocks is not None
    assert [trace.blocks.of(i).tolist() for i in range(2)] == [[2], [2]]
    assert trace.report.steps == ("slice [1:4:2]",)
    assert (trace.report.num_rows_kept, trace.report.count("dropped")) == (2, 2)
    assert len(with_blocks()[9:]) == 0
    with pytest.raises(TypeError, match="sliced"):
        with_blocks()[0]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least 1"):
        with_blocks()[::-1]


def test_the_digest_covers_content_and_nothing_else() -> None:
    base = with_blocks()
    report = TraceReport("elsewhere", "native", 9, 4)
    same = Trace.of(
        "other name", base.arrival_ns, base.num_prompt_tokens, base.num_output_tokens,
        row=[9, 8, 7, 6], report=report, blocks=base.blocks,
    )  # fmt: skip
    assert same.sha256() == base.sha256()
    assert base.blocks is not None
    others = [
        small(),
        small(tenant=["a", "b", "", ""]),
        small(session=["a", "b", "", ""]),
        small(tenant=["a", "", "b", ""]),
        small(priority=[0, 0, 0, 0]),
        Trace.of("small", [0, 10, 10, 41], [5, 3, 9, 2], [1, 2, 3, 4]),
        Trace.of("small", [0, 10, 10, 40], [1, 2, 3, 4], [5, 3, 9, 2]),
        small(blocks=BlockIds(4, np.array([0, 1, 2, 0, 3, 4, 5]), base.blocks.offsets)),
    ]
    assert len({trace.sha256() for trace in [base, *others]}) == 1 + len(others)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "from pagedserve.traces.trace import Trace\n"
        "print(Trace.of('t', [0, 1], [2, 3], [4, 5], tenant=['a', 'b']).sha256())"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout.strip())
    assert seen == {Trace.of("t", [0, 1], [2, 3], [4, 5], tenant=["a", "b"]).sha256()}


def test_describe() -> None:
    summary = with_blocks().describe()
    assert (summary.num_requests, summary.span_s) == (4, 40e-9)
    assert summary.rate_per_s == pytest.approx(4 / 40e-9)
    gaps = [10, 0, 30]
    mean = sum(gaps) / 3
    assert summary.gap_cv == pytest.approx((sum((gap - mean) ** 2 for gap in gaps) / 3) ** 0.5 / mean)
    assert summary.prompt is not None
    assert (summary.prompt.mean, summary.prompt.median, summary.prompt.max) == (4.75, 4.0, 9)
    assert summary.prompt.p99 == pytest.approx(5 + 0.97 * (9 - 5))
    assert summary.as_dict()["prefix"]["hit_share"] == summary.prefix.hit_share == 2 / 7  # pyright: ignore
    # Request 2 finds block 0 whole; request 3 has 2 of the 3 tokens that request 1 left under id 2.
    assert summary.prefix is not None
    assert summary.prefix.num_hit_tokens == 4 + 2
    assert any("2 of 7 blocks of 4" in line for line in summary.lines())


def test_describe_leaves_undefined_numbers_out() -> None:
    one = Trace.of("one", [7], [5], [1]).describe()
    assert (one.span_s, one.rate_per_s, one.gap_cv) == (0.0, None, None)
    burst = Trace.of("burst", [7, 7], [5, 5], [1, 1]).describe()
    assert (burst.rate_per_s, burst.gap_cv) == (None, None)
    none = Trace.of("none", [], [], []).describe()
    assert (none.span_s, none.prompt) == (None, None)
    assert none.lines() == ["requests  0"]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12), st.data())
def test_infinite_cache_equals_a_plain_dictionary(paths: list[list[int]], data: st.DataObject) -> None:
    """Prompts are paths in a tree; the id of a block is the number of its path, so it fixes its prefix."""
    size = 5
    numbers: dict[tuple[int, ...], int] = {}
    ids, prompts = [], []
    for path in paths:
        ids.append([numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))])
        prompts.append((len(path) - 1) * size + data.draw(st.integers(1, size)))
    blocks = BlockIds(
        size,
        np.array([i for row in ids for i in row], dtype=np.int64),
        np.cumsum([0, *map(len, ids)]),
    )
    trace = Trace.of("tree", range(len(paths)), prompts, [1] * len(paths), blocks=blocks)

    most: dict[int, int] = {}
    hit_blocks = hit_tokens = 0
    for row, prompt in zip(ids, prompts, strict=True):
        held = [min(size, prompt - i * size) for i in range(len(row))]
        for block, tokens in zip(row, held, strict=True):
            if block not in most:
                break
            hit_blocks += 1
            hit_tokens += min(tokens, most[block])
        for block, tokens in zip(row, held, strict=True):
            most[block] = max(tokens, most.get(block, 0))
    prefix = trace.describe().prefix
    assert (None if prefix is None else (prefix.num_hit_blocks, prefix.num_hit_tokens)) == (
        (hit_blocks, hit_tokens) if paths else None
    )


def test_importing_traces_loads_nothing_heavy() -> None:
    code = (
        "import sys, pagedserve.traces\n"
        "assert 'numpy' not in sys.modules\n"
        "import pagedserve.traces.readers, pagedserve.traces.synthesis, pagedserve.traces.requests\n"
        "import pagedserve.traces.transforms, pagedserve.traces.sample_files\n"
        "print(sorted({'pandas', 'pyarrow', 'torch', 'simpy', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
