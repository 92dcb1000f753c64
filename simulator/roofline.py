"""Step times from first principles: device peaks x model geometry. No measurement of the model is needed.

A step is a sequence of kernels, and each kind takes the larger of its arithmetic time and its memory time
(Williams, Waterman, Patterson: Roofline, CACM 2009), at a stated fraction of the device's peaks:

    GEMMs        max(2 x layer params x tokens, layer weights once + inputs and outputs)
    LM head      the same for the rows that sample; its weights are read only if there are any
    attention    chunks: max(4 x query size x attended pairs, KV of context and chunk + queries, outputs)
                 decodes: the same with one query a sequence; both summed over layers
    swaps        bytes of the blocks over the link to the host, and once more gathered in device memory
    elementwise  norms, rotary, gated activation, KV write, embedding: memory only
    overhead     so much a kernel, so much more an attention kernel, whatever the step holds

How far it can be trusted, with the default parameters and checked in the tests. Against published kernel
times (aiconfigurator-core tables: H200, bf16, vLLM 0.24; attention is FlashAttention-3 with 32 query and 8
KV heads of 128):

    GEMM 4096 x 4096      within 7 % up to 16 rows and from 1,024; 13 and 21 % below at 128 and 256 (tiles)
    prefill attention     within 20 % from 2,048 to 16,384 tokens; 29 and 24 % below at 512 and 1,024
    decode attention      within 20 %, but 36 and 40 % below at 128 and 256 sequences of 127 tokens

The last is a cost per sequence, which is not modelled; nor is imbalance between sequences of unequal length.
Two parameters (attention efficiency and overhead) were read off these same tables. Published mean times per
token of vLLM on an H100 at low load, from which nothing was read, come out within 10 % by the device step
alone (Llama-2-7B, Qwen3-14B); with the assumed host time added, 3 to 12 % off. Tensor parallelism is not
described.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from pagedserve.policy.plan import StepShape
from pagedserve.simulator.cost import Int64Array, ShapeBatch, chunk_features
from pagedserve.simulator.devices import Device
from pagedserve.simulator.geometry import ModelGeometry
from pagedserve.simulator.roofline_parameters import (
    CPU_PARAMETERS,
    CPU_SOURCES,
    GPU_PARAMETERS,
    GPU_SOURCES,
    RooflineParameters,
)


class _Coefficients(NamedTuple):
    """Nanoseconds for one unit of each feature of a step."""

    overhead: float
    token_gemm_compute: float
    token_gemm_memory: float
    layer_weights: float
    token_elementwise: float
    sample_compute: float
    sample_memory: float
    head_weights: float
    pair_compute: float
    kv_memory: float
    query_memory: float
    swap_overhead: float
    swap_block: float


class RooflineCost:
    """The roofline of one model on one device; a :class:`pagedserve.simulator.cost.CostModel`.

    ``parameters=None`` takes ``GPU_PARAMETERS`` or ``CPU_PARAMETERS`` by the device's kind. ``block_size`` is that
    of the KV blocks that are swapped. Nothing in a formula is out of range, so ``num_extrapolated`` stays 0; its
    accuracy is another matter, see the module.
    """

    __slots__ = ("_coefficients", "block_size", "device", "geometry", "parameters")

    def __init__(
        self,
        device: Device,
        geometry: ModelGeometry,
        parameters: RooflineParameters | None = None,
        block_size: int = 16,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self.device = device
        self.geometry = geometry
        self.parameters = parameters or (CPU_PARAMETERS if device.kind == "cpu" else GPU_PARAMETERS)
        self._coefficients = _coefficients(device, geometry, self.parameters, block_size)

    def step_ns(self, shape: StepShape) -> int:
        overhead, gemm, head, elementwise, chunks, decodes, swaps = self._shape_parts(shape)
        return int(overhead + gemm + head + elementwise + chunks + decodes + swaps + 0.5)

    def steps_ns(self, batch: ShapeBatch) -> Int64Array:
        overhead, gemm, head, elementwise, chunks, decodes, swaps = _parts_ns(
            self._coefficients,
            np.maximum,
            batch.num_chunk_tokens,
            batch.num_chunk_pairs,
            batch.chunk_context_sum,
            batch.num_decodes,
            batch.decode_context_sum,
            batch.num_samples,
            batch.num_blocks_swapped_out,
            batch.num_blocks_swapped_in,
        )
        return (overhead + gemm + head + elementwise + chunks + decodes + swaps + 0.5).astype(np.int64)

    def parts_ns(self, shape: StepShape) -> dict[str, float]:
        """Nanoseconds of a step by kind of kernel; their sum, rounded, is ``step_ns``."""
        names = ("overhead", "gemm", "lm_head", "elementwise", "chunk_attention", "decode_attention", "swaps")
        return dict(zip(names, self._shape_parts(shape), strict=True))

    def _shape_parts(self, shape: StepShape) -> tuple[float, ...]:
        tokens, pairs, contexts = chunk_features(shape.chunks) if shape.chunks else (0, 0, 0)
        return _parts_ns(
            self._coefficients,
            max,
            tokens,
            pairs,
            contexts,
            shape.num_decodes,
            shape.decode_context_sum,
            shape.num_samples,
            shape.num_blocks_swapped_out,
            shape.num_blocks_swapped_in,
        )

    def check_swaps(self, block_size: int) -> None:
        """See `pagedserve.simulator.cost.CostModel.check_swaps`."""
        if block_size != self.block_size:
            raise ValueError(
                f"the roofline prices swaps of blocks of {self.block_size} tokens and the limits have {block_size}: "
                f"make it with block_size={block_size}"
            )

    def host_ns(self, shape: StepShape) -> int:
        rows = len(shape.chunks) + shape.num_decodes
        return self.parameters.host_step_ns + self.parameters.host_row_ns * rows

    def hosts_ns(self, batch: ShapeBatch) -> Int64Array:
        rows = batch.num_chunks + batch.num_decodes
        return self.parameters.host_step_ns + self.parameters.host_row_ns * rows

    def describe(self) -> dict[str, Any]:
        is_cpu = self.device.kind == "cpu"
        defaults, sources = (CPU_PARAMETERS, CPU_SOURCES) if is_cpu else (GPU_PARAMETERS, GPU_SOURCES)
        chosen = asdict(self.parameters)
        return {
            "name": "roofline",
            "device": asdict(self.device),
            "geometry": asdict(self.geometry),
            "block_size": self.block_size,
            "parameters": chosen,
            "sources": {
                name: sources[name] if value == getattr(defaults, name) else "set by the caller"
                for name, value in chosen.items()
            },
        }

    @property
    def num_extrapolated(self) -> int:
        return 0


def _coefficients(
    device: Device, geometry: ModelGeometry, parameters: RooflineParameters, block_size: int
) -> _Coefficients:
    layers, hidden, ffn = geometry.num_layers, geometry.hidden_size, geometry.ffn_size
    query, kv = geometry.query_size, geometry.kv_size
    activation = parameters.activation_element_bytes
    byte_ns = 1e9 / (device.bytes_per_s * parameters.bandwidth_efficiency)
    gemm_flop_ns = 1e9 / (device.flops_per_s * parameters.gemm_efficiency)
    attention_flop_ns = 1e9 / (device.flops_per_s * parameters.attention_efficiency)
    # Elements that the matrices of a layer read and write for a token: QKV, O, gate and up, down.
    gemm_elements = (hidden + query + 2 * kv) + (query + hidden) + (hidden + 2 * ffn) + (ffn + hidden)
    # Two norms with residual (read 2, write 2 each), rotary on Q and K, gated activation, KV read to write.
    elementwise = 8 * hidden + 2 * (query + kv) + 3 * ffn + 2 * kv
    kernels = layers * parameters.kernels_per_layer + parameters.kernels_per_step
    overhead = kernels * parameters.kernel_overhead_ns + layers * parameters.attention_overhead_ns
    link_byte_ns = 1e9 / (device.host_bytes_per_s * parameters.host_link_efficiency)
    weight_ns = geometry.weight_element_bytes * byte_ns
    return _Coefficients(
        overhead=float(overhead),
        token_gemm_compute=2 * layers * geometry.num_layer_matrix_params * gemm_flop_ns,
        token_gemm_memory=layers * gemm_elements * activation * byte_ns,
        layer_weights=layers * geometry.num_layer_matrix_params * weight_ns,
        token_elementwise=((layers * elementwise + 2 * hidden) * activation + geometry.kv_bytes_per_token)
        * byte_ns,
        sample_compute=2 * geometry.num_head_params * gemm_flop_ns,
        # A row reads its hidden state; its logits are written, read, written as fp32 and read to sample.
        sample_memory=(hidden * activation + geometry.vocab_size * (2 * activation + 8)) * byte_ns,
        head_weights=geometry.num_head_params * weight_ns,
        pair_compute=4 * layers * query * attention_flop_ns,
        kv_memory=geometry.kv_bytes_per_token * byte_ns,
        query_memory=2 * layers * query * activation * byte_ns,
        swap_overhead=2.0 * parameters.kernel_overhead_ns,
        # Over the link; and read and written where blocks are gathered or scattered.
        swap_block=block_size * geometry.kv_bytes_per_token * (link_byte_ns + 2 * byte_ns),
    )


def _parts_ns(
    coefficients: _Coefficients,
    maximum: Callable[[Any, Any], Any],
    chunk_tokens: Any,
    chunk_pairs: Any,
    chunk_contexts: Any,
    decodes: Any,
    decode_contexts: Any,
    samples: Any,
    swapped_out: Any,
    swapped_in: Any,
) -> tuple[Any, ...]:
    """The formula, for Python ints (``maximum=max``) and int64 columns (``np.maximum``) alike.

    Bit-equal for both: the same IEEE operations in the same order on exact integers, element by element,
    and only sums, products and maxima, each correctly rounded wherever it runs (so the caller adds the parts
    with ``+``: the built-in ``sum`` compensates). Every coefficient is at least 0 and rounding is monotone,
    so more work never costs less.
    """
    (
        overhead,
        token_gemm_compute,
        token_gemm_memory,
        layer_weights,
        token_elementwise,
        sample_compute,
        sample_memory,
        head_weights,
        pair_compute,
        kv_memory,
        query_memory,
        swap_overhead,
        swap_block,
    ) = coefficients
    tokens, num_directions = chunk_tokens + decodes, 1 * (swapped_out > 0) + (swapped_in > 0)
    chunk_kv, decode_kv = chunk_contexts + chunk_tokens, decode_contexts + decodes
    return (
        overhead,
        maximum(tokens * token_gemm_compute, layer_weights + tokens * token_gemm_memory),
        maximum(samples * sample_compute, (samples > 0) * head_weights + samples * sample_memory),
        tokens * token_elementwise,
        maximum(chunk_pairs * pair_compute, chunk_kv * kv_memory + chunk_tokens * query_memory),
        maximum(decode_kv * pair_compute, decode_kv * kv_memory + decodes * query_memory),
        num_directions * swap_overhead + (swapped_out + swapped_in) * swap_block,
    )
