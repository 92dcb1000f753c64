"""What `build_report` compiles: every kernel, at the sizes that it is launched with for some well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagedserve.kernels import greedy, philox, rms_norm, rope_kv, sampling, silu_multiply
from pagedserve.kernels.attention import AttentionSpec
from pagedserve.kernels.attention_triton import MERGED_ROWS, Shape, choose_shape
from pagedserve.kernels.launching import next_power_of_two
from pagedserve.kernels.paged_attention import merge_splits_kernel, paged_attention_kernel


@dataclass(frozen=True, slots=True)
class BuildCase:
    """One kernel with its argument types and constants; ``constants`` by argument name."""

    name: str
    model: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    max_registers: int | None = None

    @property
    def aligned(self) -> list[str]:
        """Arguments that are multiples of 16: all pointers, and strides in elements, but those of block tables."""
        return [name for name, kind in self.signature.items() if kind.startswith("*") or name in _ALIGNED]


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    attention: AttentionSpec
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    has_head_norm: bool = False


MODELS = (
    ModelShape("llama-3.1-8b", AttentionSpec(32, 8, 128), 4096, 14336, 128256),
    ModelShape("qwen3-0.6b", AttentionSpec(16, 8, 128), 1024, 3072, 151936, has_head_norm=True),
    ModelShape("smollm2-135m", AttentionSpec(9, 3, 64), 576, 1536, 49152),
)
BLOCK_SIZE = 16
_ALIGNED = (
    "stride_query",
    "stride_block",
    "stride_rows",
    "stride_delta",
    "stride_gate_up",
    "stride_projected",
    "stride_logits",
    "stride_weights",
)


def build_cases() -> Iterator[BuildCase]:
    """All of them."""
    for model in MODELS:
        yield from _attention(model)
        yield from _between_products(model)
        yield from _sampling(model)


def _attention(model: ModelShape) -> Iterator[BuildCase]:
    spec = model.attention
    sizes: dict[str, Any] = {"element_bytes": 2, "max_len": 4096, "num_sms": 132, "num_programs": 8}
    for name, query_len, invariant in (
        ("decode", 1, False),
        ("chunk", 512, False),
        ("decode, invariant", 1, True),
        ("chunk, invariant", 512, True),
    ):
        asked = {"max_query_len": query_len, "invariant": invariant, **sizes}
        yield _attention_case(f"attention {name}", model, choose_shape(spec, **asked))
        if not invariant:
            shape = choose_shape(spec, **{**asked, "element_bytes": 1})
            yield _attention_case(f"attention {name}, fp8 cache", model, shape, is_fp8=True)
    padded = next_power_of_two(spec.head_dim)
    yield BuildCase(
        "attention, merge of splits",
        model.name,
        merge_splits_kernel,
        _signature(
            merge_splits_kernel, out_ptr="*bf16", partial_ptr="*fp32", stats_ptr="*fp32", value_scale="fp32"
        ),
        {"HEAD_DIM": spec.head_dim, "PADDED_DIM": padded, "NUM_SPLITS": 16, "BLOCK_R": MERGED_ROWS},
        4,
    )


def _attention_case(name: str, model: ModelShape, shape: Shape, is_fp8: bool = False) -> BuildCase:
    spec = model.attention
    types = dict.fromkeys(("out_ptr", "query_ptr"), "*bf16")
    types |= dict.fromkeys(("partial_ptr", "stats_ptr"), "*fp32")
    types |= dict.fromkeys(("tables_ptr", "starts_ptr", "contexts_ptr"), "*i32")
    types |= dict.fromkeys(("exponent", "cap", "cap_factor", "value_scale"), "fp32")
    constants = {
        "KV_HEADS": spec.num_kv_heads,
        "GROUP": spec.group,
        "HEAD_DIM": spec.head_dim,
        "PADDED_DIM": next_power_of_two(spec.head_dim),
        "BLOCK_SIZE": BLOCK_SIZE,
        "BLOCK_Q": shape.block_q,
        "BLOCK_M": shape.block_m,
        "TILE": shape.tile,
        "NUM_SPLITS": shape.num_splits,
        "SPLIT": shape.split,
        "WINDOW": 0,
        "HAS_CAP": False,
        "IS_FP8": is_fp8,
        "PRECISION": "ieee",
        "INTERPRETED": False,
    }
    signature = _signature(paged_attention_kernel, layer_ptr="*u8" if is_fp8 else "*bf16", **types)
    return BuildCase(
        name, model.name, paged_attention_kernel, signature, constants, shape.num_warps, shape.num_stages
    )


def _between_products(model: ModelShape) -> Iterator[BuildCase]:
    """Norms, gates, and rotation with the cache's write."""
    rows, block, num_warps = rms_norm.choose_tile(model.hidden_size)
    types = dict.fromkeys(("out_ptr", "rows_ptr", "delta_ptr", "weight_ptr"), "*bf16")
    signature = _signature(rms_norm.rms_norm_kernel, eps="fp32", **types)
    for name, has_delta in (("norm", False), ("add and norm", True)):
        constants = {"SIZE": model.hidden_size, "ROWS": rows, "BLOCK": block, "HAS_DELTA": has_delta}
        yield BuildCase(name, model.name, rms_norm.rms_norm_kernel, signature, constants, num_warps)
    rows, block = silu_multiply.choose_tile(model.intermediate_size)
    kernel = silu_multiply.silu_multiply_kernel
    signature = _signature(kernel, out_ptr="*bf16", gate_up_ptr="*bf16")
    constants = {"SIZE": model.intermediate_size, "ROWS": rows, "BLOCK": block}
    yield BuildCase("silu times up", model.name, kernel, signature, constants, silu_multiply.NUM_WARPS)
    yield _rope_case("rotate and write", model)
    yield _rope_case("rotate and write, fp8 cache", model, is_fp8=True)


def _rope_case(name: str, model: ModelShape, is_fp8: bool = False) -> BuildCase:
    spec, kernel = model.attention, rope_kv.rope_kv_kernel
    tile = rope_kv.choose_tile(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    types = dict.fromkeys(("query_ptr", "projected_ptr", "query_norm_ptr", "key_norm_ptr"), "*bf16")
    types |= dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64")
    types |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    types |= dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32")
    constants = {
        "HEADS": spec.num_heads,
        "KV_HEADS": spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "TOKENS": tile.tokens,
        "HEADS_BLOCK": tile.heads,
        "HALF_BLOCK": tile.half,
        "BLOCK_SIZE": BLOCK_SIZE,
        "HAS_NORM": model.has_head_norm,
        "IS_FP8": is_fp8,
    }
    signature = _signature(kernel, layer_ptr="*u8" if is_fp8 else "*bf16", **types)
    return BuildCase(name, model.name, kernel, signature, constants, rope_kv.NUM_WARPS)


def _sampling(model: ModelShape) -> Iterator[BuildCase]:
    """Greedy choice, weights, random choice, and the noise."""
    chunks = {
        "NUM_CHUNKS": -(-model.vocab_size // greedy.CHUNK),
        "CHUNK": greedy.CHUNK,
    }
    kernel: Any = greedy.largest_kernel
    signature = _signature(kernel, partial_ptr="*i64", logits_ptr="*fp32")
    yield BuildCase("largest of a chunk", model.name, kernel, signature, chunks, greedy.NUM_WARPS)
    kernel = greedy.join_largest_kernel
    signature = _signature(kernel, tokens_ptr="*i64", peaks_ptr="*fp32", partial_ptr="*i64")
    count = chunks["NUM_CHUNKS"]
    constants = {"NUM_CHUNKS": count, "PADDED_CHUNKS": next_power_of_two(count)}
    yield BuildCase("largest of a row", model.name, kernel, signature, constants, 1)
    count = -(-model.vocab_size // sampling.CHUNK)
    chunks = {"NUM_CHUNKS": count, "CHUNK": sampling.CHUNK}
    types = {"masses_ptr": "*i64", "counts_ptr": "*i32", "rows_ptr": "*i64"}
    kernel = sampling.weigh_kernel
    floats = dict.fromkeys(("logits_ptr", "peaks_ptr", "temperature_ptr"), "*fp32")
    signature = _signature(kernel, min_weight_ptr="*i64", **floats, **types)
    yield BuildCase("weights", model.name, kernel, signature, chunks, sampling.WEIGH_WARPS)
    kernel = sampling.choose_kernel
    types |= dict.fromkeys(("tokens_ptr", "top_k_ptr", "words_ptr"), "*i64")
    signature = _signature(kernel, weights_ptr="*fp32", top_p_ptr="*fp64", **types)
    constants = {**chunks, "PADDED_CHUNKS": next_power_of_two(count)}
    yield BuildCase(
        "random choice",
        model.name,
        kernel,
        signature,
        constants,
        sampling.CHOOSE_WARPS,
        max_registers=sampling.CHOOSE_REGISTERS,
    )
    kernel = philox.noise_words_kernel
    names = ("words_ptr", "seeds_ptr", "positions_ptr", "sample_indices_ptr")
    signature = _signature(kernel, **dict.fromkeys(names, "*i64"))
    yield BuildCase("noise", model.name, kernel, signature, {"ROUNDS": 10, "BLOCK": philox.BLOCK}, 4)


def _signature(kernel: Any, **types: str) -> dict[str, str]:
    """Types of all arguments: those given, constants, and i32 for the rest."""
    return {
        parameter.name: "constexpr" if parameter.is_constexpr else types.get(parameter.name, "i32")
        for parameter in kernel.params
    }
