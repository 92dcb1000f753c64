"""Decode steps as CUDA graphs: one for each of a few batch sizes; a batch is padded up to the next of them.

A decode step of a small model is hundreds of kernels of microseconds each; launched one by one, the host takes longer
than the device. A graph is recorded once, on buffers that stay, and launched as one (as vLLM and nano-vllm do).
Padding rows are inert: their slot is -1, so that nothing is written, and they read one position of the block that
is always zero.

The buffers may be filled while the step before is replayed: everything of a step, the copies into them, the replay,
the sampling of its logits and the copies of what was sampled, is put in line on one stream by one thread, so that the
next step's copies come after all of it. What outlives a step (tokens, peaks, logprobs) is in tensors of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.model import Model
from pagedserve.kernels.kv_cache import KVCache

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]
STEP = 8
MOST_ROWS = 512
WARM_UPS = 2


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth up to ``max_num_seqs``, itself included, at most `MOST_ROWS`: vLLM's sizes."""
    most = min(max_num_seqs, MOST_ROWS)
    return tuple(sorted({size for size in (1, 2, 4, *range(STEP, most + 1, STEP), most) if size <= most}))


def size_for(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None if none does."""
    place = bisect.bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None


class DecodeGraphs:
    """Graphs of one model on one cache."""

    def __init__(
        self, model: Model, kv: KVCache, sizes: tuple[int, ...], max_model_len: int, capture: Capture
    ) -> None:
        """Make the buffers; `record` makes the graphs. ``capture`` records a function and gives its replay."""
        self.sizes, self._model, self._kv, self._capture = sizes, model, kv, capture
        self._replays: dict[int, Replay] = {}
        rows, width, device = sizes[-1], -(-max_model_len // kv.block_size), model.device
        self._max_context_len = max_model_len - 1
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._tables = torch.full((rows, width), kv.zero_block, dtype=torch.int32, device=device)
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def record(self) -> Iterator[int]:
        """Record one after the other and give its size, the largest first: the others fit the memory that it took."""
        for size in reversed(self.sizes):
            batch = self._batch(size)

            def run(batch: ForwardBatch = batch) -> torch.Tensor:
                return self._model.logits(self._model.forward(batch, self._kv))

            self._replays[size] = self._capture(run)
            yield size

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits [S, V] of a batch of S decodes, valid until the next call; None if no graph is large enough."""
        count = batch.num_sequences
        size = size_for(count, self.sizes)
        if size is None:
            return None
        self._fill(batch, count, size)
        return self._replays[size]()[:count]

    def _fill(self, batch: ForwardBatch, count: int, size: int) -> None:
        """Put a batch into the buffers, and what pads it up to ``size``."""
        width = batch.block_tables.shape[1]
        for buffer, values in (
            (self._token_ids, batch.token_ids),
            (self._positions, batch.positions),
            (self._slots, batch.slot_mapping),
            (self._contexts, batch.context_lens),
        ):
            buffer[:count].copy_(values, non_blocking=True)
        self._tables[:count, :width].copy_(batch.block_tables, non_blocking=True)
        if count < size:
            self._slots[count:size] = -1
            self._contexts[count:size] = 0
            self._positions[count:size] = 0
            self._tables[count:size, 0] = self._kv.zero_block

    def _batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            query_start=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            max_query_len=1,
            max_context_len=self._max_context_len,
            num_decodes=size,
        )


def cuda_capture() -> Capture:
    """Records CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], torch.Tensor]) -> Replay:
        # What is compiled or chosen on a first run must not be part of the graph; on a side stream, as torch asks.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return capture


def make_graphs(model: Model, kv: KVCache, max_num_seqs: int, max_model_len: int) -> DecodeGraphs | None:
    """Graphs for a model whose kernels allow it: the Triton backend on a CUDA device, one rank; else None."""
    if model.device.type != "cuda" or model.attention.name != "triton" or model.ranks.size > 1:
        return None
    return DecodeGraphs(model, kv, graph_sizes(max_num_seqs), max_model_len, cuda_capture())
