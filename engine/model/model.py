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
from pagedserve.engine.model.layers import Linear, rms_norm, silu_and_multiply
from pagedserve.engine.model.rope import RotaryTable, inverse_frequencies, rotate
from pagedserve.engine.model.weights import TensorSource, check_tensors
from pagedserve.kernels.attention import AttentionBackend, AttentionSpec, make_attention
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits

if TYPE_CHECKING:
    from pagedserve.engine.engine import Vocabulary
    from pagedserve.engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; query, key and value are one product, gate and up another."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Model:
    """A model on one device, ready to run. One thread at a time: the CPU attention keeps a scratch buffer."""

    __slots__ = (
        "attention",
        "config",
        "device",
        "dtype",
        "embedding",
        "final_norm",
        "head",
        "layers",
        "max_model_len",
        "rotary",
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
    ) -> None:
        """Read the weights from ``source``, tensor by tensor, converting to ``dtype``.

        ``max_model_len`` bounds positions (default: the config's ``max_position_embeddings``). Raises
        ``WeightsError`` for a missing, unexpected or wrongly shaped tensor, ``ValueError`` for an unknown
        backend or more positions than the config has.
        """
        num_positions = config.max_position_embeddings
        if max_model_len is not None and max_model_len > num_positions:
            raise ValueError(
                f"max_model_len is {max_model_len}; the model has {num_positions} positions: lower it"
            )
        check_tensors(config, source)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.max_model_len = num_positions if max_model_len is None else max_model_len
        spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window)
        self.attention = (
            make_attention(attention, spec, self.device) if isinstance(attention, str) else attention
        )
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rotary = RotaryTable(frequencies, self.max_model_len, self.device)
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
        norm = config.head_norm
        return Layer(
            input_norm=self._tensor(source, prefix + "input_layernorm.weight"),
            qkv=self._linear(source, attn, ("q_proj", "k_proj", "v_proj"), bias=config.qkv_bias),
            query_norm=self._tensor(source, attn + "q_norm.weight") if norm else None,
            key_norm=self._tensor(source, attn + "k_norm.weight") if norm else None,
            output=self._linear(source, attn, ("o_proj",), bias=config.output_bias),
            mlp_norm=self._tensor(source, prefix + "post_attention_layernorm.weight"),
            gate_up=self._linear(source, prefix + "mlp.", ("gate_proj", "up_proj"), bias=config.mlp_bias),
            down=self._linear(source, prefix + "mlp.", ("down_proj",), bias=config.mlp_bias),
        )

    def make_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache that fits this model, on its device and in its dtype."""
        config = self.config
        return KVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
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

        return ModelRunner(self, limits, vocabulary.size, overlaps, caches_prefixes, kv)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Run T tokens: write their keys and values to ``kv``, return hidden states [T, hidden_size].

        Row t is what predicts the token after token t, and is passed to ``logits``. Within a step every layer
        writes before it attends, so tokens of one sequence see each other.
        """
        config, eps = self.config, self.config.rms_norm_eps
        plan = self.attention.prepare(batch, kv)
        rows = kv.rows(batch.slot_mapping)
        cos, sin = self.rotary.at(batch.positions)
        hidden = torch.nn.functional.embedding(batch.token_ids, self.embedding)
        num_rotated = config.num_heads + config.num_kv_heads
        for index, layer in enumerate(self.layers):
            projected = layer.qkv(rms_norm(hidden, layer.input_norm, eps)).view(
                batch.num_tokens, -1, config.head_dim
            )
            heads = projected[:, :num_rotated]
            if layer.query_norm is not None and layer.key_norm is not None:
                query = rms_norm(heads[:, : config.num_heads], layer.query_norm, eps)
                heads = torch.cat((query, rms_norm(heads[:, config.num_heads :], layer.key_norm, eps)), dim=1)
            heads = rotate(heads, cos, sin)
            projected[:, config.num_heads : num_rotated] = heads[:, config.num_heads :]
            kv.write(index, projected[:, config.num_heads :], rows)
            mixed = self.attention.attend(heads[:, : config.num_heads], kv.layer(index), plan)
            hidden = hidden.add_(layer.output(mixed.view(batch.num_tokens, -1)))
            hidden.add_(layer.down(silu_and_multiply(layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps)))))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size] for the rows [R, hidden_size] of ``forward`` to sample."""
        return self.head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)).float()
