"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache, in one launch.

For a token at position p with query, key and value heads of D numbers, x1 and x2 the halves of a head and c, s the
cosines and sines [D / 2] of p (RoFormer, Su et al. 2021; halves against each other, as in transformers):

    rotate(x) = (x1 c - x2 s, x2 c + x1 s)
    query_out[t, h] = rotate(query[t, h])
    cache[block, 0, h, offset] = rotate(key[t, h])        slot[t] = block * block_size + offset
    cache[block, 1, h, offset] = value[t, h]              nothing where slot[t] is -1

With head norms (Qwen3) x is norm(x) * w before the rotation, its mean of squares over the head, rounded to the
dtype. All is float32 inside. A cache of bytes holds e4m3 of key / key_scale and value / value_scale, rounded once.

Offsets into the cache are 64 bits: a block's number times its size passes 2^31 in caches of ordinary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagedserve.kernels.fp8 import float_to_e4m3
from pagedserve.kernels.launching import next_power_of_two
from pagedserve.kernels.rms_norm import rms_norm_twin

HEADS_BLOCK_NUMBERS = 1024
"""Numbers of a program's heads, in two halves: eight a thread."""
NUM_WARPS = 4


@triton.jit
def _rotated(place, kept, half, cos, sin, weight_ptr, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Both halves [heads, D / 2] of rotated heads, float32; ``place`` points at their first halves."""
    first = tl.load(place, mask=kept, other=0.0)
    second = tl.load(place + HEAD_DIM // 2, mask=kept, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORM:
        inside = half < HEAD_DIM // 2
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first *= scale * tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        weight = tl.load(weight_ptr + HEAD_DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
        second *= scale * weight[None, :]
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def _cached(values, scale, layer_ptr, IS_FP8: tl.constexpr):
    """What the cache holds of float32 values."""
    if IS_FP8:
        return float_to_e4m3(tl.div_rn(values, tl.full(values.shape, 0.0, tl.float32) + scale))
    else:
        return values.to(layer_ptr.dtype.element_ty)


@triton.jit
def rope_kv_kernel(
    query_ptr,
    layer_ptr,
    projected_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    key_scale,
    value_scale,
    stride_projected,
    stride_block,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Grid (T, parts): parts of HEADS_BLOCK query heads first, then of as many KV heads.

    query_ptr [T, H, D], projected_ptr [T, H + 2 KVH, D] with a stride between tokens, cos_ptr and sin_ptr
    [positions, D / 2] float32, positions_ptr and slots_ptr [T] int64, the layer as `KVCache.layer` has it.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    half = tl.arange(0, HALF_BLOCK)
    inside = half < HEAD_DIM // 2
    angle = tl.load(positions_ptr + token) * (HEAD_DIM // 2) + half
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    source = projected_ptr + token * stride_projected
    if part < query_parts:
        head = part * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        kept = (head < HEADS)[:, None] & inside[None, :]
        place = head[:, None] * HEAD_DIM + half[None, :]
        first, second = _rotated(
            source + place, kept, half, cos, sin, query_norm_ptr, eps, HEAD_DIM, HAS_NORM
        )
        out = query_ptr + token * (HEADS * HEAD_DIM) + place
        tl.store(out, first.to(query_ptr.dtype.element_ty), mask=kept)
        tl.store(out + HEAD_DIM // 2, second.to(query_ptr.dtype.element_ty), mask=kept)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            head = (part - query_parts) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
            kept = (head < KV_HEADS)[:, None] & inside[None, :]
            keys = source + HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + half[None, :]
            first, second = _rotated(keys, kept, half, cos, sin, key_norm_ptr, eps, HEAD_DIM, HAS_NORM)
            row = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * HEAD_DIM
            out = layer_ptr + row + head[:, None] * (BLOCK_SIZE * HEAD_DIM) + half[None, :]
            tl.store(out, _cached(first, key_scale, layer_ptr, IS_FP8), mask=kept)
            tl.store(out + HEAD_DIM // 2, _cached(second, key_scale, layer_ptr, IS_FP8), mask=kept)
            values = keys + KV_HEADS * HEAD_DIM
            first = tl.load(values, mask=kept, other=0.0).to(tl.float32)
            second = tl.load(values + HEAD_DIM // 2, mask=kept, other=0.0).to(tl.float32)
            out += KV_HEADS * BLOCK_SIZE * HEAD_DIM
            tl.store(out, _cached(first, value_scale, layer_ptr, IS_FP8), mask=kept)
            tl.store(out + HEAD_DIM // 2, _cached(second, value_scale, layer_ptr, IS_FP8), mask=kept)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] of the norms of each query head and each key head, and their epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def choose_blocks(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Numbers of half a head, heads of a program, and programs of a token."""
    half = next_power_of_two(head_dim // 2)
    heads = max(1, min(next_power_of_two(num_heads), HEADS_BLOCK_NUMBERS // (2 * half)))
    return half, heads, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)


def rotate_and_write(
    projected: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    layer: torch.Tensor,
    norms: HeadNorms | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Return rotated queries [T, H, D] for ``projected`` [T, H + 2 KVH, D]; write keys and values to ``layer``.

    positions and slots: [T] int64, every position within the tables. tables: cosines and sines [positions, D / 2]
    float32. layer: ``cache.layer(i)``, of the same dtype or bytes. scales: of keys and values, for bytes only.
    """
    num_tokens, num_projected, head_dim = projected.shape
    _, _, num_kv_heads, block_size, _ = layer.shape
    num_heads = num_projected - 2 * num_kv_heads
    _check(projected, positions, tables, slots, layer, scales)
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=projected.dtype, device=projected.device)
    half, heads, parts = choose_blocks(num_heads, num_kv_heads, head_dim)
    rope_kv_kernel[(num_tokens, parts)](
        query,
        layer,
        projected,
        positions,
        *tables,
        slots,
        query if norms is None else norms.query,
        query if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        *scales,
        projected.stride(0),
        layer.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=half,
        HEADS_BLOCK=heads,
        BLOCK_SIZE=block_size,
        HAS_NORM=norms is not None,
        IS_FP8=layer.dtype == torch.uint8,
        num_warps=NUM_WARPS,
    )
    return query


def _check(
    projected: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    layer: torch.Tensor,
    scales: tuple[float, float],
) -> None:
    num_tokens, num_projected, head_dim = projected.shape
    _, two, num_kv_heads, block_size, layer_dim = layer.shape
    assert two == 2, f"a layer of the cache has shape {tuple(layer.shape)}"
    assert layer_dim == head_dim, f"heads of {head_dim} for a cache of {layer_dim}"
    assert head_dim % 2 == 0, f"heads of {head_dim} have no halves"
    assert num_projected > 2 * num_kv_heads, f"{num_projected} heads, twice {num_kv_heads} of them keys"
    assert projected.stride()[1:] == (head_dim, 1), f"strides {projected.stride()}: heads must lie together"
    assert layer.stride()[1:] == (
        num_kv_heads * block_size * head_dim,
        block_size * head_dim,
        head_dim,
        1,
    ), f"a layer with strides {layer.stride()}"
    assert layer.dtype in (projected.dtype, torch.uint8), f"{projected.dtype} for a cache of {layer.dtype}"
    assert layer.dtype == torch.uint8 or scales == (1.0, 1.0), f"scales {scales} for a cache of {layer.dtype}"
    for each in (positions, slots):
        assert each.dtype == torch.int64, f"{each.dtype} for positions or slots"
        assert each.shape == (num_tokens,), f"{tuple(each.shape)} for {num_tokens} tokens"
    for table in tables:
        assert table.dtype == torch.float32, f"a table of {table.dtype}"
        assert table.shape[1:] == (head_dim // 2,), f"a table {tuple(table.shape)} for heads of {head_dim}"
        assert table.is_contiguous(), f"a table with strides {table.stride()}"


def rotate_and_write_twin(
    projected: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    layer: torch.Tensor,
    norms: HeadNorms | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """As `rotate_and_write`, by the formula, token after token."""
    num_kv_heads, block_size = layer.shape[2:4]
    num_heads = projected.shape[1] - 2 * num_kv_heads
    query, key, value = projected.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = (table[positions].unsqueeze(1) for table in tables)
    if norms is not None:
        query, key = (
            rms_norm_twin(heads, weight, norms.eps)
            for heads, weight in ((query, norms.query), (key, norms.key))
        )
    key, value = _rotate(key, cos, sin), value.float()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for side, rows in enumerate((key, value)):
                layer[slot // block_size, side, :, slot % block_size] = _stored(
                    rows[token], scales[side], layer.dtype
                )
    return _rotate(query, cos, sin).to(projected.dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _stored(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.uint8:
        return values.to(dtype)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
