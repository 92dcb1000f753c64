"""What a step costs: the questions that every cost model answers, and many steps at once as columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedserve.policy import Limits, Policy
from pagedserve.policy.plan import StepShape

Int64Array = NDArray[np.int64]


class CostModel(Protocol):
    """Turns the shape of a step into integer nanoseconds, below 2**63.

    The answer depends on the shape alone, never on earlier questions. ``steps_ns(batch)[i]`` is the same
    integer as ``step_ns(shape_i)``, and likewise for host times: a simulation that jumps over a thousand
    steps and one that walks them end in the same record. The scheduler's empty plan has no step and is
    never asked about; a shape without tokens is charged like any launch.
    """

    def step_ns(self, shape: StepShape) -> int:
        """Nanoseconds from launch to commit of one step: device time and whatever lies inside."""
        ...

    def steps_ns(self, batch: "ShapeBatch") -> Int64Array:
        """``step_ns`` of every step of a batch, int64 of shape (num_steps,)."""
        ...

    def host_ns(self, shape: StepShape) -> int:
        """Nanoseconds of host work between schedule and launch of one step: scheduling, input preparation.

        At overlap depth 0 it adds to every step; at depth 1 it hides behind the step that is running.
        """
        ...

    def hosts_ns(self, batch: "ShapeBatch") -> Int64Array:
        """``host_ns`` of every step of a batch, int64 of shape (num_steps,)."""
        ...

    def check_swaps(self, block_size: int) -> None:
        """Raise ValueError if it cannot say what copying KV blocks of so many tokens costs; see `check_priced`."""
        ...

    def describe(self) -> dict[str, Any]:
        """What goes into the header of a record: name, parameters and sources, as JSON-able values."""
        ...

    @property
    def num_extrapolated(self) -> int:
        """Steps asked about so far that lie outside what the model was measured on; 0 for pure formulas."""
        ...


def check_priced(cost: CostModel, policy: Policy, limits: Limits) -> None:
    """Raise ValueError, before a run, if the policy can swap and the cost model cannot price that."""
    if limits.num_cpu_blocks and policy.can_swap:
        cost.check_swaps(limits.block_size)


def chunk_features(chunks: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Exact sums over the prefill chunks of one step: tokens, attended pairs, context tokens.

    A chunk of n tokens on top of a context of c attends n*c + n(n+1)/2 pairs of query and key: every query
    sees the context, itself and the chunk's earlier tokens.
    """
    num_tokens = num_pairs = num_contexts = 0
    for tokens, context in chunks:
        num_tokens += tokens
        num_pairs += tokens * context + tokens * (tokens + 1) // 2
        num_contexts += context
    return num_tokens, num_pairs, num_contexts


@dataclass(frozen=True, slots=True, eq=False)
class ShapeBatch:
    """The features of many steps as int64 columns of shape (num_steps,), exact like ``StepShape`` itself.

    ``num_chunk_pairs`` counts attended (query, key) pairs of the prefill chunks, ``chunk_context_sum`` the
    tokens in KV before them. Models that look at single chunks find those of step i at
    ``chunk_offsets[i]:chunk_offsets[i + 1]`` of ``chunk_tokens`` and ``chunk_contexts``; they should round
    each chunk to integers before they add, so that the order of addition cannot matter.
    """

    num_chunk_tokens: Int64Array
    num_chunks: Int64Array
    num_chunk_pairs: Int64Array
    chunk_context_sum: Int64Array
    num_decodes: Int64Array
    decode_context_sum: Int64Array
    decode_context_max: Int64Array
    decode_context_sumsq: Int64Array
    num_samples: Int64Array
    num_blocks_swapped_out: Int64Array
    num_blocks_swapped_in: Int64Array
    chunk_tokens: Int64Array
    chunk_contexts: Int64Array
    chunk_offsets: Int64Array

    def __len__(self) -> int:
        return len(self.num_decodes)

    @classmethod
    def from_shapes(cls, shapes: Sequence[StepShape]) -> "ShapeBatch":
        """Any steps, in order. Raises OverflowError if a feature does not fit 64 bits."""
        rows = [
            (
                *chunk_features(shape.chunks),
                len(shape.chunks),
                shape.num_decodes,
                shape.decode_context_sum,
                shape.decode_context_max,
                shape.decode_context_sumsq,
                shape.num_samples,
                shape.num_blocks_swapped_out,
                shape.num_blocks_swapped_in,
            )
            for shape in shapes
        ]
        columns = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(len(rows), 11).T)
        tokens, pairs, contexts, chunks, decodes, context_sum, context_max, context_sumsq = columns[:8]
        samples, swapped_out, swapped_in = columns[8:]
        flat = [chunk for shape in shapes for chunk in shape.chunks]
        return cls(
            num_chunk_tokens=tokens,
            num_chunks=chunks,
            num_chunk_pairs=pairs,
            chunk_context_sum=contexts,
            num_decodes=decodes,
            decode_context_sum=context_sum,
            decode_context_max=context_max,
            decode_context_sumsq=context_sumsq,
            num_samples=samples,
            num_blocks_swapped_out=swapped_out,
            num_blocks_swapped_in=swapped_in,
            chunk_tokens=np.array([chunk[0] for chunk in flat], dtype=np.int64),
            chunk_contexts=np.array([chunk[1] for chunk in flat], dtype=np.int64),
            chunk_offsets=np.concatenate(([0], np.cumsum(chunks))).astype(np.int64),
        )

    @classmethod
    def from_steady_decodes(cls, first: StepShape, num_steps: int) -> "ShapeBatch":
        """``num_steps`` steps of one unchanged decode group, beginning with ``first``.

        Each step leaves every sequence one token longer, so the context sum grows by the group's size, the
        maximum by one, and the sum of squares from Q to Q + 2kS + k²n after k steps. Raises ValueError if
        ``first`` has prefill chunks or swaps blocks, or ``num_steps`` is negative.
        """
        if first.chunks:
            raise ValueError(
                f"the step has {len(first.chunks)} prefill chunks; a steady decode group has none"
            )
        swapped = first.num_blocks_swapped_out + first.num_blocks_swapped_in
        if swapped:
            raise ValueError(f"the step swaps {swapped} blocks; a steady decode group swaps none")
        if num_steps < 0:
            raise ValueError(f"num_steps is {num_steps}; it must not be negative")
        k = np.arange(num_steps, dtype=np.int64)
        none, empty = np.zeros(num_steps, dtype=np.int64), np.zeros(0, dtype=np.int64)
        n, context_sum = first.num_decodes, first.decode_context_sum
        return cls(
            num_chunk_tokens=none,
            num_chunks=none,
            num_chunk_pairs=none,
            chunk_context_sum=none,
            num_decodes=np.full(num_steps, n, dtype=np.int64),
            decode_context_sum=context_sum + k * n,
            decode_context_max=first.decode_context_max + k,
            decode_context_sumsq=first.decode_context_sumsq + k * (2 * context_sum) + k * k * n,
            num_samples=np.full(num_steps, first.num_samples, dtype=np.int64),
            num_blocks_swapped_out=none,
            num_blocks_swapped_in=none,
            chunk_tokens=empty,
            chunk_contexts=empty,
            chunk_offsets=np.zeros(num_steps + 1, dtype=np.int64),
        )
