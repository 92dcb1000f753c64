"""Attention over a paged KV cache: what a backend is given, and what it must return.

Per query token t of sequence s at position p, for query head h with KV head h // group:

    out[t, h] = softmax(scale * q[t, h] . K[s, 0..p]) V[s, 0..p]

(with cap * tanh(score / cap) inside the softmax where there is a soft cap),

where K and V of position i lie in the block ``block_tables[s, i // block_size]`` at offset
``i % block_size``. With a sliding window w only the positions p - w < i <= p are seen. The step's own keys
and values are already written when a backend runs. Slots that no token of the sequence was written to may
hold anything, NaN included, and must not reach the result.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagedserve.kernels.kv_cache import UNSCALED, KVCache, Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the T tokens of one step's S sequences live; tokens are flattened, sequence after sequence.

    All tensors are on the cache's device. A sequence has ``query_start[s + 1] - query_start[s]`` >= 1 tokens
    in this step, and ``context_lens[s]`` tokens in the cache from steps before; their sum is its length.
    The two maxima let a GPU backend size its launch without waiting for the device.
    """

    slot_mapping: torch.Tensor
    """[T] int64: block * block_size + offset, the slot that token t's key and value are written to."""
    block_tables: torch.Tensor
    """[S, B] int32 block ids, in order of position; entries beyond a sequence's length are ignored."""
    query_start: torch.Tensor
    """[S + 1] int32: first token of each sequence, then T."""
    context_lens: torch.Tensor
    """[S] int32: tokens in the cache before this step."""
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0
    """The last so many sequences have one token each in this step; GPU backends treat them apart."""

    @property
    def num_sequences(self) -> int:
        return self.block_tables.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The heads of one model; ``sliding_window`` in tokens, None for full attention.

    ``soft_cap``: scaled scores become cap * tanh(score / cap); None for no cap.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied by: 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5


class AttentionBackend(Protocol):
    """One way to compute attention. ``prepare`` runs once a step, ``attend`` once a layer with its result."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> AttentionSpec: ...

    def prepare(self, batch: PagedBatch, cache: KVCache) -> Any:
        """Work out what all layers share (indices, masks, launch sizes); its result goes to ``attend``."""
        ...

    def attend(
        self, query: torch.Tensor, layer: torch.Tensor, plan: Any, scales: Scales = UNSCALED
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] in ``query``'s dtype, for ``query`` of that shape.

        ``layer`` is ``cache.layer(i)``: [num_blocks + 1, 2, num_kv_heads, block_size, head_dim]; ``scales`` is
        ``cache.scales[i]``, other than 1 only in a cache of bytes, which not every backend reads.
        """
        ...


BACKENDS = ("reference", "cpu", "triton")


def make_attention(name: str, spec: AttentionSpec, device: torch.device | str = "cpu") -> AttentionBackend:
    """Make the backend called ``name``; ``auto`` is ``cpu`` on a CPU, ``triton`` on CUDA, else ``reference``.

    Raises ``ValueError`` for an unknown name, or for one that cannot run on the device.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        name = {"cpu": "cpu", "cuda": "triton"}.get(torch.device(device).type, "reference")
    if name == "reference":
        from pagedserve.kernels.attention_reference import ReferenceAttention

        return ReferenceAttention(spec)
    if name == "cpu":
        if not on_cpu:
            raise ValueError(
                f"attention backend 'cpu' cannot run on device {str(device)!r}; use 'auto' or 'reference'"
            )
        from pagedserve.kernels.attention_cpu import CpuAttention

        if spec.soft_cap is not None:
            raise ValueError("attention backend 'cpu' has no soft cap; use 'reference'")
        return CpuAttention(spec)
    if name == "triton":
        from pagedserve.kernels.launching import check_can_launch

        check_can_launch(torch.device(device))
        from pagedserve.kernels.attention_triton import TritonAttention

        return TritonAttention(spec, device)
    raise ValueError(f"unknown attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
