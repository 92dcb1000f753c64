"""From trace rows to requests: ids, limits and prefix keys at our block size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.traces.blocks import BlockIds
from pagedserve.traces.report import TraceError
from pagedserve.traces.requests import prefix_keys, to_requests
from pagedserve.traces.trace import Trace
from pagedserve.traces.transforms import clip_lengths


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_requests_carry_the_facts_and_one_limit() -> None:
    trace = Trace.of("t", [5, 6], [10, 20], [3, 9], priority=[1, -1], tenant=["a", ""])
    requests = to_requests(trace, 16)
    assert isinstance(requests, Sequence)
    first, second = requests
    assert (first.id, first.arrival_ns, first.num_prompt_tokens, first.max_tokens) == (0, 5, 10, 9)
    assert (first.prefix_keys, first.priority, first.tenant) == (None, 1, "a")
    assert (second.id, second.max_tokens, second.priority) == (1, 9, -1)
    assert (first.deadline_ns, first.predicted_output_tokens) == (None, None)
    assert [request.max_tokens for request in to_requests(trace, 16, max_tokens=4)] == [4, 4]
    assert all(
        type(value) is int
        for value in (first.id, first.arrival_ns, first.num_prompt_tokens, first.max_tokens)
    )


def test_requests_are_a_sequence_that_can_be_read_again() -> None:
    trace = Trace.of("long", range(10_000), range(1, 10_001), [1] * 10_000)
    requests = to_requests(trace, 16)
    assert len(requests) == 10_000
    assert list(requests) == list(requests)
    assert requests[-1] == list(requests)[-1]
    assert [request.id for request in requests[4095:4098]] == [4095, 4096, 4097]
    with pytest.raises(IndexError):
        requests[10_000]
    assert list(to_requests(Trace.of("none", [], [], []), 16)) == []


def test_keys_where_a_trace_block_holds_several_of_ours() -> None:
    # 21 tokens in trace blocks of 8 (the third holds 5): five full blocks of 4.
    keys = prefix_keys(ids(7, 3, 9), 8, 4, 21)
    assert keys == (14, 15, 6, 7, 18)
    assert all(type(key) is int for key in keys)


def test_keys_where_ours_holds_several_of_the_traces() -> None:
    assert prefix_keys(ids(7, 3, 9, 4, 5), 8, 16, 39) == (3, 4)
    assert prefix_keys(ids(7, 3, 9), 8, 8, 23) == (7, 3)  # the partial last block has no key
    assert prefix_keys(ids(7), 8, 16, 8) == ()


def test_keys_of_huge_ids_stay_exact() -> None:
    assert prefix_keys(ids(2**63 - 1, 2), 32, 16, 63) == (2**64 - 2, 2**64 - 1, 4)


def test_block_sizes_that_do_not_fit_are_refused_with_both_numbers() -> None:
    trace = Trace.of("t", [0], [10], [1], blocks=BlockIds(12, ids(0), ids(0, 1)))
    with pytest.raises(TraceError, match=r"blocks of 12 tokens and the scheduler's blocks hold 8"):
        to_requests(trace, 8)
    assert to_requests(trace, None)[0].prefix_keys is None
    with pytest.raises(TraceError, match="block_size must be at least 1"):
        to_requests(trace, 0)
    with pytest.raises(TraceError, match="max_tokens must be at least 1"):
        to_requests(trace, 12, max_tokens=0)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8),
    st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 4), (1, 4), (3, 6), (6, 3)]),
    st.integers(1, 24),
)
def test_equal_keys_mean_equal_prefixes(
    prompts: list[list[int]], sizes: tuple[int, int], max_prompt: int
) -> None:
    """Prompts of real tokens; trace ids number the prefixes that end each trace block, also after a cut."""
    trace_size, our_size = sizes
    numbers: dict[tuple[int, ...], int] = {}
    rows = [
        [
            numbers.setdefault(tuple(tokens[: end + trace_size]), len(numbers))
            for end in range(0, len(tokens), trace_size)
        ]
        for tokens in prompts
    ]
    blocks = BlockIds(trace_size, ids(*[i for row in rows for i in row]), np.cumsum([0, *map(len, rows)]))
    trace = Trace.of(
        "t", range(len(rows)), [len(tokens) for tokens in prompts], [1] * len(rows), blocks=blocks
    )
    prefix_of: dict[object, tuple[int, ...]] = {}
    for request in to_requests(clip_lengths(trace, max_prompt), our_size):
        tokens = prompts[request.id][:max_prompt]
        assert request.prefix_keys is not None
        assert len(request.prefix_keys) == len(tokens) // our_size
        for index, key in enumerate(request.prefix_keys):
            prefix = tuple(tokens[: (index + 1) * our_size])
            assert prefix_of.setdefault(key, prefix) == prefix
