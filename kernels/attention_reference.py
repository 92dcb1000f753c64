"""Naive attention over block tables: the oracle for every other backend.

Every query token is computed alone, from the positions it may see and nothing else, with element-wise
products and sums over one axis. So its result depends on its own position and data only, to the bit: not on
the batch, on how its prompt was cut into chunks, or on which blocks it was given. float32 inside, whatever
the dtype.
"""

from dataclasses import dataclass

import torch

from pagedserve.kernels.attention import AttentionSpec, PagedBatch
from pagedserve.kernels.kv_cache import UNSCALED, KVCache, Scales


@dataclass(frozen=True, slots=True)
class _Query:
    token: int
    slots: torch.Tensor
    """[n, 2] int64: block and offset of each position the token sees, oldest first."""


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """See ``AttentionBackend``. Any device and dtype; slow on purpose."""

    spec: AttentionSpec
    name: str = "reference"

    def prepare(self, batch: PagedBatch, cache: KVCache) -> list[_Query]:
        """List, for every token, the slots that it attends to."""
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        window = self.spec.sliding_window
        queries: list[_Query] = []
        for sequence, context in enumerate(contexts):
            table = batch.block_tables[sequence].to(torch.int64)
            for token in range(starts[sequence], starts[sequence + 1]):
                position = context + token - starts[sequence]
                first = 0 if window is None else max(0, position - window + 1)
                seen = torch.arange(first, position + 1, device=table.device)
                blocks = table[torch.div(seen, cache.block_size, rounding_mode="floor")]
                queries.append(_Query(token, torch.stack((blocks, seen % cache.block_size), dim=1)))
        return queries

    def attend(
        self, query: torch.Tensor, layer: torch.Tensor, plan: list[_Query], scales: Scales = UNSCALED
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for ``query`` of that shape."""
        assert scales == UNSCALED, f"scales {scales} for a cache of {layer.dtype}"
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for item in plan:
            out[item.token] = self._attend_one(query[item.token], layer, item.slots)
        return out

    def _attend_one(self, query: torch.Tensor, layer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """One token: ``query`` [H, D] against the keys and values at ``slots``."""
        spec = self.spec
        seen = layer[slots[:, 0], :, :, slots[:, 1]].float()  # [n, 2, KVH, D]
        keys, values = seen.permute(1, 2, 0, 3).contiguous()  # each [KVH, n, D]
        grouped = query.float().view(spec.num_kv_heads, spec.group, 1, spec.head_dim)
        scores = (grouped * keys[:, None]).sum(-1) * spec.scale  # [KVH, G, n]
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = torch.softmax(scores, dim=-1)
        mixed = (weights[..., None] * values[:, None]).sum(-2)  # [KVH, G, D]
        return mixed.reshape(spec.num_heads, spec.head_dim).to(query.dtype)
