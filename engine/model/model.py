"""The forward pass of the Llama family over flattened tokens and a paged KV cache.

    x = E[tokens]
    for each layer:  x += O attend(rope(Q norm(x)), rope(K norm(x)), V norm(x))
                     x += D (silu(G norm(x)) * U norm(x))
    logits = H norm(x)

No padding, no per-request state, no phases: a token is its id, its position and its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.kv_dtype import choose_kv_dtype
from pagedserve.engine.model.kv_scales import KVScales, no_scales, read_scales
from pagedserve.engine.model.layers import Linear
from pagedserve.engine.model.operations import HeadNorms, make_operations
from pagedserve.engine.model.rope import RotaryTable, inverse_frequencies
from pagedserve.engine.model.weights import TensorSource, check_tensors
from pagedserve.engine.parallel.communicator import ALONE, Communicator
from pagedserve.engine.parallel.ranks import NO_RANKS, Ranks
from pagedserve.engine.parallel.shards import Shard, ShardedSource, shard_config
from pagedserve.kernels.attention import AttentionBackend, AttentionSpec, make_attention
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits

if TYPE_CHECKING:
    from pagedserve.engine.intake import Vocabulary
    from pagedserve.engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; query, key and value are one product, gate and up another."""

    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Model:
    """A model on one device, ready to run. One thread at a time: the CPU attention keeps a scratch buffer."""

    __slots__ = (
        "attention",
        "communicator",
        "config",
        "device",
        "dtype",
        "embedding",
        "final_norm",
        "head",
        "kv_dtype",
        "kv_scales",
        "layers",
        "local",
        "max_model_len",
        "operations",
        "ranks",
    )

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attention: str | AttentionBackend = "auto",
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        shard: Shard | None = None,
        communicator: Communicator = ALONE,
    ) -> None:
        """Read the weights from ``source``, tensor by tensor, converting to ``dtype``.

        ``config`` and ``source`` are the whole model's; ``shard``: read only this rank's part, the sizes of which
        are ``local``, and whose sums and logits ``communicator`` joins. ``max_model_len`` bounds positions
        (default: the config's ``max_position_embeddings``). ``kv_cache_dtype``: auto, as ``dtype``, or fp8, e4m3
        by ``kv_scales`` (half the memory of bfloat16, and keys and values to 3 bits of mantissa). Raises
        ``WeightsError`` for a missing, unexpected or wrongly shaped tensor, ``ValueError`` for an unknown backend,
        more positions than the config has, or a cache that the backend cannot read.
        """
        num_positions = config.max_position_embeddings
        if max_model_len is not None and max_model_len > num_positions:
            raise ValueError(
                f"max_model_len is {max_model_len}; the model has {num_positions} positions: lower it"
            )
        check_tensors(config, source)
        self.config = self.local = config
        whole = source
        if shard is not None:
            self.local, source = shard_config(config, shard), ShardedSource(source, config, shard)
        self.communicator = communicator
        self.ranks: Ranks = NO_RANKS
        config, self.dtype, self.device = self.local, dtype, torch.device(device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton's kernels and graphs run on their thread's own
        self.max_model_len = num_positions if max_model_len is None else max_model_len
        spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window)
        self.attention = (
            make_attention(attention, spec, self.device) if isinstance(attention, str) else attention
        )
        self.kv_dtype = choose_kv_dtype(kv_cache_dtype, self.attention.name, dtype)
        self.kv_scales: KVScales = (
            read_scales(whole, config.num_layers) if self.has_byte_cache else no_scales(config.num_layers)
        )
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        rotary = RotaryTable(frequencies, self.max_model_len, self.device)
        self.operations = make_operations(self.attention.name, rotary, config.rms_norm_eps)
        self.embedding = self._tensor(source, "model.embed_tokens.weight")
        self.layers = tuple(
            self._layer(source, f"model.layers.{index}.") for index in range(config.num_layers)
        )
        self.final_norm = self._tensor(source, "model.norm.weight")
        tied = config.tie_word_embeddings
        self.head = Linear(self.embedding if tied else self._tensor(source, "lm_head.weight"))

    def _tensor(self, source: TensorSource, name: str) -> torch.Tensor:
        return source.get(name).to(dtype=self.dtype, device=self.device)

    def _linear(self, source: TensorSource, prefix: str, parts: tuple[str, ...], *, bias: bool) -> Linear:
        """Stack the projections ``parts`` into one, in that order."""
        weights = [self._tensor(source, f"{prefix}{part}.weight") for part in parts]
        biases = [self._tensor(source, f"{prefix}{part}.bias") for part in parts] if bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Linear(weight, torch.cat(biases) if biases else None)

    def _layer(self, source: TensorSource, prefix: str) -> Layer:
        config, attn = self.config, prefix + "self_attn."
        head_norms = None
        if config.head_norm:
            head_norms = (
                self._tensor(source, attn + "q_norm.weight"),
                self._tensor(source, attn + "k_norm.weight"),
            )
        return Layer(
            input_norm=self._tensor(source, prefix + "input_layernorm.weight"),
            qkv=self._linear(source, attn, ("q_proj", "k_proj", "v_proj"), bias=config.qkv_bias),
            head_norms=head_norms,
            output=self._linear(source, attn, ("o_proj",), bias=config.output_bias),
            mlp_norm=self._tensor(source, prefix + "post_attention_layernorm.weight"),
            gate_up=self._linear(source, prefix + "mlp.", ("gate_proj", "up_proj"), bias=config.mlp_bias),
            down=self._linear(source, prefix + "mlp.", ("down_proj",), bias=config.mlp_bias),
        )

    @property
    def has_byte_cache(self) -> bool:
        """Its caches hold e4m3, which has scales."""
        return self.kv_dtype == torch.uint8

    def make_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVCache:
        """Allocate a KV cache that fits this model, on its device; ``dtype``: not its cache's own, but this."""
        config, dtype = self.local, dtype or self.kv_dtype
        return KVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            self.device,
            self.kv_scales.by_layer if dtype == torch.uint8 else None,
        )

    def make_runner(
        self,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        overlaps: bool,
        caches_prefixes: bool,
        kv: KVCache | None = None,
    ) -> ModelRunner:
        """A runner of this model for one engine; see `pagedserve.engine.runners.RunnerMaker`."""
        from pagedserve.engine.runner import ModelRunner  # which needs this module

        return ModelRunner(self, limits, vocabulary.size, overlaps, caches_prefixes, kv, self.ranks)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Run T tokens: write their keys and values to ``kv``, return hidden states [T, hidden_size].

        Row t is what predicts the token after token t, and is passed to ``logits``. Within a step every layer
        writes before it attends, so tokens of one sequence see each other.
        """
        operations, attention, communicator = self.operations, self.attention, self.communicator
        attended, shared = attention.prepare(batch, kv), operations.prepare(batch, kv)
        hidden = communicator.embed(batch.token_ids, self.embedding)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = operations.norm(hidden, layer.input_norm, delta)
            projected = layer.qkv(normed).view(batch.num_tokens, -1, self.config.head_dim)
            query = operations.rotate_and_write(projected, layer.head_norms, kv, index, shared)
            mixed = attention.attend(query, kv.layer(index), attended, kv.scales[index])
            delta = communicator.sum(layer.output(mixed.view(batch.num_tokens, -1)))
            normed = operations.norm(hidden, layer.mlp_norm, delta)
            delta = communicator.sum(layer.down(operations.gate(layer.gate_up(normed))))
        return hidden if delta is None else hidden.add_(delta)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size] for the rows [R, hidden_size] of ``forward`` to sample."""
        return self.communicator.gather(self.head(self.operations.norm(hidden, self.final_norm))).float()
