"""What `build_report` compiles: every kernel, at the sizes that it is launched with for some well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

    @property
    def aligned(self) -> list[str]:
        """Arguments that are multiples of 16: all pointers, and strides of queries and blocks in elements."""
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
_ALIGNED = ("stride_query", "stride_block")


def build_cases() -> Iterator[BuildCase]:
    """All of them."""
    for model in MODELS:
        yield from _attention(model)


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
        "WIDENS": False,
    }
    signature = _signature(paged_attention_kernel, layer_ptr="*u8" if is_fp8 else "*bf16", **types)
    return BuildCase(
        name, model.name, paged_attention_kernel, signature, constants, shape.num_warps, shape.num_stages
    )


def _signature(kernel: Any, **types: str) -> dict[str, str]:
    """Types of all arguments: those given, constants, and i32 for the rest."""
    return {
        parameter.name: "constexpr" if parameter.is_constexpr else types.get(parameter.name, "i32")
        for parameter in kernel.params
    }
