"""From a trace to the requests a scheduler is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from pagedserve.policy.request import Request
from pagedserve.traces.blocks import IntArray
from pagedserve.traces.report import TraceError
from pagedserve.traces.trace import Trace

_PAGE = 4096
"""Requests made from the columns at a time while iterating: plain integers come cheap by the list."""


class TraceRequests(Sequence[Request]):
    """The requests of a trace, each made when asked for, so that a trace of millions costs no memory twice.

    Request ids are positions in the trace: ``trace.num_output_tokens[request.id]`` is the true output length,
    which no request carries.
    """

    __slots__ = ("_block_size", "_max_tokens", "_trace")

    def __init__(self, trace: Trace, block_size: int | None, max_tokens: int) -> None:
        self._trace = trace
        self._block_size = block_size
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._trace)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"request {index} of a trace of {len(self)}")
        return next(self._page(position, position + 1))

    def __iter__(self) -> Iterator[Request]:
        for start in range(0, len(self), _PAGE):
            yield from self._page(start, min(start + _PAGE, len(self)))

    def _page(self, start: int, end: int) -> Iterator[Request]:
        """The requests from ``start`` to before ``end``."""
        trace, rows = self._trace, slice(start, end)
        count = end - start
        arrivals = trace.arrival_ns[rows].tolist()
        prompts = trace.num_prompt_tokens[rows].tolist()
        priorities = [0] * count if trace.priority is None else trace.priority[rows].tolist()
        tenants = [""] * count if trace.tenant is None else trace.tenant[rows].tolist()
        for offset in range(count):
            yield Request(
                id=start + offset,
                arrival_ns=arrivals[offset],
                num_prompt_tokens=prompts[offset],
                max_tokens=self._max_tokens,
                prefix_keys=self._keys(start + offset, prompts[offset]),
                priority=priorities[offset],
                tenant=tenants[offset],
            )

    def _keys(self, index: int, num_prompt_tokens: int) -> tuple[int, ...] | None:
        blocks, block_size = self._trace.blocks, self._block_size
        if blocks is None or block_size is None:
            return None
        return prefix_keys(blocks.of(index), blocks.block_size, block_size, num_prompt_tokens)


def to_requests(trace: Trace, block_size: int | None, max_tokens: int | None = None) -> TraceRequests:
    """The requests of a trace for a scheduler with this block size, made lazily.

    Every request declares the same ``max_tokens``, by default the trace's longest output, because a scheduler
    must not know true output lengths. A smaller limit is allowed: outputs then end there. If the trace has
    block ids, each request gets one key for every full block of *our* size in its prompt (see `prefix_keys`);
    with ``block_size`` None, or without ids, prompts are not cacheable. Keys of two traces may be equal by
    chance.

    Raises `TraceError` if neither block size divides the other.
    """
    if block_size is not None and block_size < 1:
        raise TraceError(f"block_size must be at least 1 token, not {block_size}")
    if max_tokens is None:
        max_tokens = int(trace.num_output_tokens.max(initial=1))
    elif max_tokens < 1:
        raise TraceError(f"max_tokens must be at least 1, not {max_tokens}")
    if trace.blocks is not None and block_size is not None:
        _check_sizes(trace.blocks.block_size, block_size)
    return TraceRequests(trace, block_size, max_tokens)


def prefix_keys(
    ids: IntArray, trace_block_size: int, block_size: int, num_prompt_tokens: int
) -> tuple[int, ...]:
    """Keys of the full blocks of ``block_size`` in a prompt whose trace blocks have these ids, as plain ints.

    Where a trace block holds several of our blocks (512 over 16), its id i gives i * 32 + 0, i * 32 + 1, ...
    . Where ours holds several of the trace's, the id of the last one covered is the key: it fixes all before
    it.
    """
    _check_sizes(trace_block_size, block_size)
    num_keys = num_prompt_tokens // block_size
    if block_size >= trace_block_size:
        step = block_size // trace_block_size
        return tuple(ids[step - 1 : num_keys * step : step].tolist())
    parts = trace_block_size // block_size
    if int(ids.max(initial=0)) > (2**63 - 1) // parts - 1:
        return tuple([i * parts + part for i in ids.tolist() for part in range(parts)][:num_keys])
    keys = ids[:, np.newaxis] * parts + np.arange(parts)
    return tuple(keys.ravel()[:num_keys].tolist())


def _check_sizes(trace_block_size: int, block_size: int) -> None:
    if trace_block_size % block_size and block_size % trace_block_size:
        raise TraceError(
            f"the trace has ids for blocks of {trace_block_size} tokens and the scheduler's blocks hold "
            f"{block_size}: one must be a multiple of the other. Choose another block size, or drop the ids "
            "with without_block_ids, on the command line --ignore-block-ids"
        )
