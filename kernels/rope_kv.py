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

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagedserve.kernels.fp8 import float_to_e4m3
from pagedserve.kernels.launching import next_power_of_two
from pagedserve.kernels.rms_norm import rms_norm_twin

TILE = 512
"""Numbers in each half of a program's heads, of one token or of several: eight a thread for both."""
NUM_WARPS = 4


@triton.jit
def _load_halves(place, kept, HEAD_DIM: tl.constexpr):
    """Both halves of heads, float32 [tokens, heads, D / 2]; ``place`` points at their first halves."""
    first = tl.load(place, mask=kept, other=0.0)
    second = tl.load(place + HEAD_DIM // 2, mask=kept, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotated(place, kept, half, cos, sin, weight_ptr, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Both halves of rotated heads, normed before where there is a norm; as `_load_halves`."""
    first, second = _load_halves(place, kept, HEAD_DIM)
    if HAS_NORM:
        dtype = place.dtype.element_ty
        inside = half < HEAD_DIM // 2
        squares = tl.sum(first * first + second * second, 2)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, :, None]
        first *= scale * tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight_ptr + HEAD_DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _cached(values, scale, entry, IS_FP8: tl.constexpr):
    """What the cache holds of float32 values; ``entry`` points at it."""
    if IS_FP8:
        cached = float_to_e4m3(tl.div_rn(values, tl.full(values.shape, 0.0, tl.float32) + scale))
    else:
        cached = values.to(entry.dtype.element_ty)
    return cached


@triton.jit
def _write_entry(entry, first, second, scale, kept, HEAD_DIM: tl.constexpr, IS_FP8: tl.constexpr):
    """Write both halves of heads to the cache."""
    tl.store(entry, _cached(first, scale, entry, IS_FP8), mask=kept)
    tl.store(entry + HEAD_DIM // 2, _cached(second, scale, entry, IS_FP8), mask=kept)


# Sizes that change from step to step: specialised, each kind of number would be compiled anew while serving.
@triton.jit(do_not_specialize=["num_tokens"])
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
    num_tokens,
    stride_projected,
    stride_block,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Grid (T / TOKENS, parts): parts of HEADS_BLOCK query heads first, then of as many KV heads.

    query_ptr [T, H, D], projected_ptr [T, H + 2 KVH, D] with a stride between tokens, cos_ptr and sin_ptr
    [positions, D / 2] float32, positions_ptr and slots_ptr [T] int64, the layer as `KVCache.layer` has it.
    """
    part = tl.program_id(1)
    query_parts: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
    is_token = token < num_tokens
    half = tl.arange(0, HALF_BLOCK)[None, None, :]
    inside = is_token & (half < HEAD_DIM // 2)
    angle = tl.load(positions_ptr + token, mask=is_token, other=0) * (HEAD_DIM // 2) + half
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    source = projected_ptr + token * stride_projected
    heads = tl.arange(0, HEADS_BLOCK)[None, :, None]
    if part < query_parts:
        head = part * HEADS_BLOCK + heads
        kept = inside & (head < HEADS)
        place = head * HEAD_DIM + half
        first, second = _rotated(
            source + place, kept, half, cos, sin, query_norm_ptr, eps, HEAD_DIM, HAS_NORM
        )
        out = query_ptr + token * (HEADS * HEAD_DIM) + place
        tl.store(out, first.to(query_ptr.dtype.element_ty), mask=kept)
        tl.store(out + HEAD_DIM // 2, second.to(query_ptr.dtype.element_ty), mask=kept)
    else:
        slot = tl.load(slots_ptr + token, mask=is_token, other=-1)
        head = (part - query_parts) * HEADS_BLOCK + heads
        kept = inside & (head < KV_HEADS) & (slot >= 0)
        keys = source + HEADS * HEAD_DIM + head * HEAD_DIM + half
        first, second = _rotated(keys, kept, half, cos, sin, key_norm_ptr, eps, HEAD_DIM, HAS_NORM)
        row = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * HEAD_DIM
        entry = layer_ptr + row + head * (BLOCK_SIZE * HEAD_DIM) + half
        _write_entry(entry, first, second, key_scale, kept, HEAD_DIM, IS_FP8)
        first, second = _load_halves(keys + KV_HEADS * HEAD_DIM, kept, HEAD_DIM)
        entry += KV_HEADS * BLOCK_SIZE * HEAD_DIM
        _write_entry(entry, first, second, value_scale, kept, HEAD_DIM, IS_FP8)


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens, heads and numbers of half a head in a program; ``parts``: programs for all heads of a token."""

    tokens: int
    heads: int
    half: int
    parts: int


def choose_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> Tile:
    """`TILE` numbers of each half, unless one head has more."""
    half = next_power_of_two(head_dim // 2)
    heads = max(1, min(next_power_of_two(num_heads), TILE // half))
    parts = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    return Tile(max(1, TILE // (half * heads)), heads, half, parts)


def rotate_and_write(
    projected: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    layer: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Return rotated queries [T, H, D] for ``projected`` [T, H + 2 KVH, D]; write keys and values to ``layer``.

    positions and slots: [T] int64, every position within the tables. tables: cosines and sines [positions, D / 2]
    float32. layer: ``cache.layer(i)``, of the same dtype or bytes. norms: weights [D] for query heads and for key
    heads, with ``eps``. scales: of keys and values, for bytes only.
    """
    num_tokens, num_projected, head_dim = projected.shape
    _, _, num_kv_heads, block_size, _ = layer.shape
    num_heads = num_projected - 2 * num_kv_heads
    _check(projected, positions, tables, slots, layer, scales)
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=projected.dtype, device=projected.device)
    tile = choose_tile(num_heads, num_kv_heads, head_dim)
    rope_kv_kernel[(triton.cdiv(num_tokens, tile.tokens), tile.parts)](
        query,
        layer,
        projected,
        positions,
        *tables,
        slots,
        *((query, query) if norms is None else norms),
        eps,
        *scales,
        num_tokens,
        projected.stride(0),
        layer.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TOKENS=tile.tokens,
        HEADS_BLOCK=tile.heads,
        HALF_BLOCK=tile.half,
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
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """As `rotate_and_write`, by the formula, token after token."""
    num_kv_heads, block_size = layer.shape[2:4]
    num_heads = projected.shape[1] - 2 * num_kv_heads
    query, key, value = projected.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = (table[positions].unsqueeze(1) for table in tables)
    if norms is not None:
        query, key = (
            rms_norm_twin(heads, weight, eps) for heads, weight in zip((query, key), norms, strict=True)
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
