"""Step shapes as columns, and the constant model; both halves exact integers."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.policy.plan import StepShape
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.cost import CostModel, ShapeBatch, chunk_features


@st.composite
def shapes_of_contexts(draw: st.DrawFn) -> StepShape:
    """A shape built from the contexts of its sequences, as a scheduler would see it."""
    chunks = draw(st.lists(st.tuples(st.integers(1, 16384), st.integers(0, 10**6)), max_size=4))
    contexts = draw(st.lists(st.integers(0, 10**6), max_size=8))
    return StepShape(
        chunks=tuple(chunks),
        num_decodes=len(contexts),
        decode_context_sum=sum(contexts),
        decode_context_max=max(contexts, default=0),
        decode_context_sumsq=sum(context**2 for context in contexts),
        num_samples=len(contexts) + draw(st.integers(0, len(chunks))),
        num_blocks_swapped_out=draw(st.integers(0, 10**6)),
        num_blocks_swapped_in=draw(st.integers(0, 10**6)),
    )


def test_chunk_features_by_hand() -> None:
    # 3 tokens on 10: 11 + 12 + 13 pairs; 2 tokens on nothing: 1 + 2.
    assert chunk_features(((3, 10), (2, 0))) == (5, 39, 10)
    assert chunk_features(()) == (0, 0, 0)


@given(tokens=st.integers(1, 60), context=st.integers(0, 60))
def test_attended_pairs_are_those_of_a_causal_mask(tokens: int, context: int) -> None:
    mask = np.tril(np.ones((tokens, context + tokens), dtype=int), k=context)
    assert chunk_features(((tokens, context),))[1] == mask.sum()


@given(st.lists(shapes_of_contexts(), max_size=6))
def test_batch_holds_the_features_of_each_shape(shapes: list[StepShape]) -> None:
    batch = ShapeBatch.from_shapes(shapes)
    assert len(batch) == len(shapes)
    for i, shape in enumerate(shapes):
        sums = (batch.num_chunk_tokens[i], batch.num_chunk_pairs[i], batch.chunk_context_sum[i])
        assert sums == chunk_features(shape.chunks)
        decodes = (batch.num_decodes[i], batch.decode_context_sum[i], batch.decode_context_max[i])
        assert decodes == (shape.num_decodes, shape.decode_context_sum, shape.decode_context_max)
        assert batch.decode_context_sumsq[i] == shape.decode_context_sumsq
        assert batch.num_samples[i] == shape.num_samples
        swapped = (batch.num_blocks_swapped_out[i], batch.num_blocks_swapped_in[i])
        assert swapped == (shape.num_blocks_swapped_out, shape.num_blocks_swapped_in)
        rows = slice(batch.chunk_offsets[i], batch.chunk_offsets[i + 1])
        chunks = zip(batch.chunk_tokens[rows].tolist(), batch.chunk_contexts[rows].tolist(), strict=True)
        assert tuple(chunks) == shape.chunks
        assert batch.num_chunks[i] == len(shape.chunks)


@given(contexts=st.lists(st.integers(0, 10**6), min_size=1, max_size=8), num_steps=st.integers(0, 20))
def test_steady_decodes_are_the_shapes_of_growing_sequences(contexts: list[int], num_steps: int) -> None:
    grown = [[context + k for context in contexts] for k in range(max(num_steps, 1))]
    shapes = [
        StepShape((), len(now), sum(now), max(now), sum(context**2 for context in now), len(now))
        for now in grown
    ]
    steady = ShapeBatch.from_steady_decodes(shapes[0], num_steps)
    walked = ShapeBatch.from_shapes(shapes[:num_steps])
    for name in ShapeBatch.__slots__:
        column, expected = getattr(steady, name), getattr(walked, name)
        assert column.dtype == expected.dtype == np.int64
        assert column.tolist() == expected.tolist(), name


def test_steady_decodes_refuse_chunks_and_negative_counts() -> None:
    with pytest.raises(ValueError, match="1 prefill chunks"):
        ShapeBatch.from_steady_decodes(StepShape(chunks=((5, 0),)), 3)
    with pytest.raises(ValueError, match="num_steps is -1"):
        ShapeBatch.from_steady_decodes(StepShape(num_decodes=1), -1)
    with pytest.raises(ValueError, match="swaps 7 blocks"):
        ShapeBatch.from_steady_decodes(StepShape(num_decodes=1, num_blocks_swapped_out=7), 3)


def test_a_feature_beyond_64_bits_is_an_error_not_a_wrap() -> None:
    with pytest.raises(OverflowError):
        ShapeBatch.from_shapes([StepShape(num_decodes=1, decode_context_sumsq=2**63)])


def test_constant_cost_by_hand() -> None:
    model: CostModel = ConstantCost(1_000, per_prefill_token_ns=10, per_decode_ns=3, host_base_ns=7)
    shape = StepShape(chunks=((4, 100), (1, 0)), num_decodes=2, decode_context_sum=9, num_samples=3)
    assert model.step_ns(shape) == 1_000 + 50 + 6
    assert model.host_ns(shape) == 7
    assert ConstantCost(5).step_ns(shape) == 5
    assert model.num_extrapolated == 0
    assert json.loads(json.dumps(model.describe()))["parameters"]["per_decode_ns"] == 3


@given(shapes=st.lists(shapes_of_contexts(), max_size=6), numbers=st.tuples(*[st.integers(0, 10**9)] * 4))
def test_constant_cost_is_the_same_alone_and_in_a_batch(
    shapes: list[StepShape], numbers: tuple[int, int, int, int]
) -> None:
    model, batch = ConstantCost(*numbers), ShapeBatch.from_shapes(shapes)
    assert model.steps_ns(batch).tolist() == [model.step_ns(shape) for shape in shapes]
    assert model.hosts_ns(batch).tolist() == [model.host_ns(shape) for shape in shapes]
    assert model.steps_ns(batch).dtype == model.hosts_ns(batch).dtype == np.int64


def test_constant_cost_refuses_negative_and_fractional_times() -> None:
    with pytest.raises(ValueError, match="base_ns is -1"):
        ConstantCost(-1)
    with pytest.raises(TypeError, match=r"per_decode_ns is 0\.5"):
        ConstantCost(1, per_decode_ns=0.5)  # pyright: ignore[reportArgumentType]
