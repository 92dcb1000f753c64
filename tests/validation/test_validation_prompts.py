"""Prompts made from a trace share tokens exactly as far as the trace says they share blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.engine.keys import PrefixKeys
from pagedserve.traces.blocks import BlockIds
from pagedserve.traces.requests import prefix_keys
from pagedserve.traces.sample_files import sample
from pagedserve.traces.trace import Trace
from pagedserve.validation.prompts import TracePrompts


def shared_trace() -> Trace:
    """Blocks of 8: two prompts share two blocks, a third only the first, a fourth none."""
    ids = [[1, 2, 3], [1, 2, 4], [1, 5], [9]]
    lengths = [20, 24, 13, 8]
    offsets = np.cumsum([0, *map(len, ids)])
    blocks = BlockIds(8, np.concatenate([np.array(row) for row in ids]), offsets)
    return Trace.of("shared", [0] * 4, lengths, [1] * 4, blocks=blocks)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_lengths_are_the_traces_and_ids_are_of_the_vocabulary():
    trace = sample("azure_shaped_500")[:50]
    prompts = TracePrompts(trace, vocab_size=97)
    assert [len(prompt) for prompt in prompts] == trace.num_prompt_tokens.tolist()
    assert {token for prompt in prompts for token in prompt} == set(range(97))


def test_prompts_share_what_their_blocks_share():
    prompts = TracePrompts(shared_trace(), vocab_size=50_000)
    assert [common(prompts[0], prompts[i]) for i in (1, 2, 3)] == [16, 8, 0]


def test_without_block_ids_no_prompt_shares_with_another():
    prompts = list(TracePrompts(Trace.of("plain", [0] * 6, [40] * 6, [1] * 6), vocab_size=50_000))
    assert len({prompt[0] for prompt in prompts}) == 6


def test_seeds_draw_other_tokens_and_the_same_seed_the_same():
    trace = shared_trace()
    first, again, other = (TracePrompts(trace, 50_000, seed) for seed in (1, 1, 2))
    assert list(first) == list(again)
    assert all(common(a, b) == 0 for a, b in zip(first, other, strict=True))


def test_indices_count_from_either_end_and_slices_are_lists():
    prompts = TracePrompts(shared_trace(), 100)
    assert prompts[-1] == prompts[3]
    assert prompts[1:3] == [prompts[1], prompts[2]]
    with pytest.raises(IndexError):
        prompts[4]
    with pytest.raises(ValueError, match="vocab_size is 0"):
        TracePrompts(shared_trace(), 0)


@given(st.sampled_from([2, 4, 8]), st.integers(0, 5))
def test_the_engines_keys_agree_where_the_simulators_do(block_size: int, seed: int):
    """Hashes of tokens are equal exactly where keys made from block ids are: the same hits in both halves."""
    trace = shared_trace()
    assert trace.blocks is not None
    prompts, hashing = TracePrompts(trace, 50_000, seed), PrefixKeys(block_size)
    simulated, live = [], []
    for index, prompt in enumerate(prompts):
        keys: list[bytes] = []
        hashing.extend(keys, hashing.root(None), prompt, len(prompt) // block_size)
        live += keys
        simulated += prefix_keys(trace.blocks.of(index), 8, block_size, len(prompt))
    same_live = [[a == b for b in live] for a in live]
    assert same_live == [[a == b for b in simulated] for a in simulated]
