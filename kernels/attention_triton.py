"""The Triton backend: how a step's batch becomes launches of `paged_attention`.

A step's decodes, which stand at the end of the batch, are one launch, its chunks another: a decode is bound by the
cache that it reads, wants few rows and perhaps splits; a chunk is bound by products, and wants many rows.
"""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.kv_cache import UNSCALED, KVCache, Scales
from pagedserve.kernels.launching import check_can_launch, is_interpreted, next_power_of_two, num_processors
from pagedserve.kernels.paged_attention import merge_splits_kernel, paged_attention_kernel

MIN_ROWS = 16
"""Rows of a tensor core's product."""
CHUNK_ROWS = 128
INVARIANT_ROWS = 64
INVARIANT_SPLIT = 512
"""Positions of a split in the invariant mode, a multiple of every tile."""
MAX_SPLITS = 32
MIN_SPLIT_TILES = 2
MERGED_ROWS = 8
SHORT_CHUNK = 4
"""Chunks of no more tokens than this are launched as decodes are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one launch: rows and tokens of a program, positions of a tile, splits, warps, stages.

    split: positions of a split in the invariant mode, else 0.
    """

    block_m: int
    block_q: int
    tile: int
    num_splits: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Sequences ``first`` to ``last`` of the batch, whose tokens are ``first_token`` to ``last_token``."""

    first: int
    last: int
    first_token: int
    last_token: int
    shape: Shape
    partial: torch.Tensor | None
    """[tokens, H, splits, D] float32 of scratch, shared by all layers; None for one split."""
    stats: torch.Tensor | None

    @property
    def num_programs(self) -> int:
        """At most so many; those behind the last token return at once."""
        begin = self.first_token // self.shape.block_q
        return self.last_token // self.shape.block_q + (self.last - self.first) - begin


@dataclass(frozen=True, slots=True)
class TritonPlan:
    batch: PagedBatch
    block_size: int
    launches: tuple[Launch, ...]


def choose_shape(
    spec: AttentionSpec,
    *,
    element_bytes: int,
    max_query_len: int,
    max_len: int,
    num_programs: int,
    num_sms: int,
    invariant: bool,
) -> Shape:
    """Sizes for sequences of up to ``max_query_len`` new tokens and ``max_len`` in all.

    ``num_programs``: programs without splits when a program has `MIN_ROWS` rows; splits are chosen so that there
    are one or two programs a processor, of `MIN_SPLIT_TILES` tiles or more each; a power of two, since each number
    is compiled for itself, which would halt a server again and again. In the invariant mode nothing
    depends on the batch but how many splits of the fixed size there are.
    """
    # A tile's keys and values, times the stages, have to fit shared memory; what is converted or joined on the way
    # has to fit registers too.
    wide = next_power_of_two(spec.head_dim) * element_bytes
    tile = 32 if wide > 256 or (element_bytes == 1 and wide > 64) or (invariant and wide > 128) else 64
    if invariant:
        rows = max(INVARIANT_ROWS, next_power_of_two(spec.group))
        is_short = max_query_len <= SHORT_CHUNK
        splits = -(-max_len // INVARIANT_SPLIT) if is_short else 1
        # Two stages of tiles of 32 spill on sm_100, three do not.
        return Shape(rows, rows // spec.group, tile, splits, INVARIANT_SPLIT, 8, 3 if wide <= 256 else 2)
    if max_query_len <= SHORT_CHUNK:
        rows = max(MIN_ROWS, next_power_of_two(spec.group))
        most = max(1, min(MAX_SPLITS, max_len // (tile * MIN_SPLIT_TILES)))
        splits = max(1, min(most, 2 * num_sms // max(1, num_programs)))
        splits = 1 << (splits.bit_length() - 1)
        return Shape(rows, rows // spec.group, tile, splits, 0, 4, 3)
    rows = max(CHUNK_ROWS if wide <= 256 else CHUNK_ROWS // 2, next_power_of_two(spec.group))
    return Shape(rows, rows // spec.group, tile, 1, 0, 8 if rows > 64 else 4, 3 if wide <= 256 else 2)


class TritonAttention:
    """See `AttentionBackend`. float32, float16 and bfloat16, CUDA devices, or any under Triton's interpreter."""

    __slots__ = ("_num_sms", "invariant", "name", "spec")

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device | str = "cuda",
        *,
        invariant: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """``invariant``: a sequence's bits depend neither on its neighbours nor on its chunks; slower."""
        check_can_launch(torch.device(device))
        self.name = "triton"
        self.spec, self.invariant = spec, invariant
        self._num_sms = num_processors(torch.device(device)) if num_sms is None else num_sms

    def prepare(self, batch: PagedBatch, cache: KVCache) -> TritonPlan:
        """Choose sizes and scratch, without waiting for the device."""
        num_tokens, num_chunks = len(batch.slot_mapping), batch.num_sequences - batch.num_decodes
        first_decode = num_tokens - batch.num_decodes
        launches = []
        if num_chunks:
            launches.append(self._launch(batch, cache, 0, num_chunks, 0, first_decode, batch.max_query_len))
        if batch.num_decodes:
            parts = (num_chunks, batch.num_sequences, first_decode, num_tokens, 1)
            launches.append(self._launch(batch, cache, *parts))
        return TritonPlan(batch, cache.block_size, tuple(launches))

    def _launch(
        self,
        batch: PagedBatch,
        cache: KVCache,
        first: int,
        last: int,
        begin: int,
        end: int,
        max_query_len: int,
    ) -> Launch:
        spec = self.spec
        per_program = max(1, max(MIN_ROWS, next_power_of_two(spec.group)) // spec.group)
        shape = choose_shape(
            spec,
            element_bytes=cache.data.element_size(),
            max_query_len=max_query_len,
            max_len=batch.max_context_len + max_query_len,
            num_programs=max(last - first, (end - begin) // per_program) * spec.num_kv_heads,
            num_sms=self._num_sms,
            invariant=self.invariant,
        )
        partial = stats = None
        if shape.num_splits > 1:
            sizes = (end - begin, spec.num_heads, shape.num_splits)
            partial = torch.empty((*sizes, spec.head_dim), dtype=torch.float32, device=cache.data.device)
            stats = torch.empty((*sizes, 2), dtype=torch.float32, device=cache.data.device)
        return Launch(first, last, begin, end, shape, partial, stats)

    def attend(
        self, query: torch.Tensor, layer: torch.Tensor, plan: TritonPlan, scales: Scales = UNSCALED
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for ``query`` of that shape; heads of a token must lie together."""
        spec = self.spec
        assert query.stride(2) == 1, f"query has strides {query.stride()}"
        assert query.stride(1) == spec.head_dim, f"query has strides {query.stride()}"
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for launch in plan.launches:
            attend_part(query, layer, out, plan.batch, launch, spec, scales)
        return out


def attend_part(
    query: torch.Tensor,
    layer: torch.Tensor,
    out: torch.Tensor,
    batch: PagedBatch,
    launch: Launch,
    spec: AttentionSpec,
    scales: Scales = UNSCALED,
) -> None:
    """Write ``out`` [T, H, D] for the tokens of one launch. scales: of keys and of values, for a cache of bytes."""
    shape = launch.shape
    log2e = math.log2(math.e)
    is_split = launch.partial is not None
    exponent = spec.scale * scales[0]
    cap = 0.0 if spec.soft_cap is None else spec.soft_cap
    # Rows of scratch are counted from the launch's first token, rows of `out` from the batch's.
    paged_attention_kernel[(launch.num_programs, spec.num_kv_heads, shape.num_splits)](
        out,
        launch.partial if is_split else out,
        launch.stats if is_split else out,
        query,
        layer,
        batch.block_tables[launch.first : launch.last],
        batch.query_start[launch.first : launch.last + 1],
        batch.context_lens[launch.first : launch.last],
        launch.last - launch.first,
        exponent if cap else exponent * log2e,
        cap,
        log2e if cap else 1.0,
        scales[1],
        launch.first_token,
        query.stride(0),
        batch.block_tables.stride(0),
        layer.stride(0),
        KV_HEADS=spec.num_kv_heads,
        GROUP=spec.group,
        HEAD_DIM=spec.head_dim,
        PADDED_DIM=next_power_of_two(spec.head_dim),
        BLOCK_SIZE=layer.shape[3],
        BLOCK_Q=shape.block_q,
        BLOCK_M=shape.block_m,
        TILE=shape.tile,
        NUM_SPLITS=shape.num_splits,
        SPLIT=shape.split,
        WINDOW=spec.sliding_window or 0,
        HAS_CAP=spec.soft_cap is not None,
        IS_FP8=layer.dtype == torch.uint8,
        PRECISION="ieee",
        INTERPRETED=is_interpreted(),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if is_split:
        _merge_splits(out, launch, spec, scales[1])


def _merge_splits(out: torch.Tensor, launch: Launch, spec: AttentionSpec, value_scale: float) -> None:
    """Write the launch's rows of ``out`` from its scratch."""
    num_rows = (launch.last_token - launch.first_token) * spec.num_heads
    merge_splits_kernel[(-(-num_rows // MERGED_ROWS),)](
        out[launch.first_token : launch.last_token],
        launch.partial,
        launch.stats,
        value_scale,
        num_rows,
        HEAD_DIM=spec.head_dim,
        PADDED_DIM=next_power_of_two(spec.head_dim),
        NUM_SPLITS=launch.shape.num_splits,
        BLOCK_R=MERGED_ROWS,
        num_warps=4,
    )
