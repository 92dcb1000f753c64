"""The paged KV cache: one tensor for all layers, written by slot.

Layout: [layer, block, key or value, KV head, offset in block, head_dim]. All that a block holds in a layer
is contiguous, so swapping it is one copy, and a head's part of it is one contiguous tile for a kernel to
load. On a CPU, gathering blocks in this layout was measured 1.0 to 1.3 times as fast as with heads outermost.
One block more than asked for is kept at the end and never handed out: it stays zero, and pads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagedserve.kernels.host_cache import HostCache

Scales = tuple[float, float]
"""What keys and values were divided by, in a cache of bytes."""
UNSCALED: Scales = (1.0, 1.0)


class KVCache:
    """Keys and values of ``num_blocks`` blocks of ``block_size`` tokens, for every layer.

    Memory starts zeroed, which also commits it: running out happens here and not in the middle of serving.
    Raises ``ValueError`` for a size below 1.
    """

    __slots__ = (
        "block_size",
        "data",
        "head_dim",
        "host",
        "num_blocks",
        "num_kv_heads",
        "num_layers",
        "scales",
    )

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: tuple[Scales, ...] | None = None,
    ) -> None:
        """``scales``: by layer, for bytes; None: `UNSCALED`."""
        for name, size in (
            ("num_layers", num_layers),
            ("num_blocks", num_blocks),
            ("block_size", block_size),
        ):
            if size < 1:
                raise ValueError(f"KV cache: {name} is {size}, it must be at least 1")
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.scales = scales or (UNSCALED,) * num_layers
        assert len(self.scales) == num_layers, f"{len(self.scales)} pairs of scales for {num_layers} layers"
        shape = (num_layers, num_blocks + 1, 2, num_kv_heads, block_size, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.host: HostCache | None = None

    @property
    def zero_block(self) -> int:
        """Id of the block that is always zero; kernels read it where a table has no block."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def layer(self, index: int) -> torch.Tensor:
        """The view [num_blocks + 1, 2, num_kv_heads, block_size, head_dim] of one layer."""
        return self.data[index]

    def rows(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Turn slots [T] into rows [T, 2 * num_kv_heads] (int64) of a layer seen as rows of head_dim numbers.

        Keys come first. Worked out once a step and passed to ``write`` for every layer. 64-bit throughout: a
        row times head_dim passes 2^31 in caches of ordinary size.
        """
        slots = slot_mapping.to(torch.int64)
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        first = block * (2 * self.num_kv_heads * self.block_size) + (slots - block * self.block_size)
        heads = torch.arange(2 * self.num_kv_heads, device=slots.device) * self.block_size
        return first[:, None] + heads[None, :]

    def write(self, index: int, keys_values: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``keys_values`` [T, 2 * num_kv_heads, head_dim] at ``rows`` of layer ``index``."""
        self.data[index].view(-1, self.head_dim).index_put_((rows,), keys_values)
