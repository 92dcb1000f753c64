"""The geometry of a model, read from a Hugging Face ``config.json``.

One frozen dataclass covers the Llama family: Llama 2/3 (SmolLM2 is one), Mistral, Qwen2 and Qwen3 differ
only in biases, head normalisation, sliding window and rope scaling. Whatever a checkpoint asks for that
this engine would compute differently is refused here, by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.engine.model.errors import UnsupportedModel
from pagedserve.engine.model.rope import RopeScaling, parse_rope

SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass needs to know; sizes are counts of elements, ``sliding_window`` is in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(
                    f"model config: {name} is {getattr(self, name)}, it must be at least 1"
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"model config: {self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(
                f"model config: head_dim {self.head_dim} is odd; rotary embedding needs pairs"
            )

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q_size + 2 * kv_size) + 3 * self.hidden_size * self.intermediate_size
        layer += 2 * self.hidden_size
        layer += (q_size + 2 * kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        layer += 2 * self.head_dim * self.head_norm
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of KV cache that one token takes over all layers, at ``element_bytes`` a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Read the dict of a ``config.json``, in the layout of transformers 4 or 5.

        Raises ``UnsupportedModel`` naming the architecture, rope type, activation or option that this
        engine does not compute, with what it does.
        """
        model_type = _model_type(values)
        _refuse_options(values)
        heads = _required_int(values, "num_attention_heads")
        hidden = _required_int(values, "hidden_size")
        attention_bias = bool(values.get("attention_bias", False))
        theta, scaling = parse_rope(values)
        return cls(
            model_type=model_type,
            vocab_size=_required_int(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required_int(values, "intermediate_size"),
            num_layers=_required_int(values, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)),
            max_position_embeddings=_required_int(values, "max_position_embeddings"),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias and model_type != "qwen2",
            mlp_bias=bool(values.get("mlp_bias", False)) and model_type == "llama",
            head_norm=model_type == "qwen3",
            sliding_window=_sliding_window(values, model_type),
        )


def _model_type(values: Mapping[str, Any]) -> str:
    architectures = list(values.get("architectures") or [])
    for architecture in architectures:
        if architecture in SUPPORTED_ARCHITECTURES:
            return SUPPORTED_ARCHITECTURES[architecture]
    named = values.get("model_type")
    if not architectures and named in SUPPORTED_ARCHITECTURES.values():
        return str(named)
    found = ", ".join(architectures) or f"model_type {named!r}"
    raise UnsupportedModel(
        f"unsupported architecture: {found}. Supported: {', '.join(sorted(SUPPORTED_ARCHITECTURES))}"
    )


def _is_of_cache_alone(quantization: object) -> bool:
    """Only the KV cache was calibrated for eight bits, a scale a tensor (llm-compressor): the weights are whole."""
    if not isinstance(quantization, Mapping) or quantization.get("config_groups"):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if quantization.get("quant_method") != "compressed-tensors" or not isinstance(scheme, Mapping):
        return False
    asked = (scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy", "tensor"))
    return asked == (8, "float", "tensor") and not scheme.get("dynamic")


def _refuse_options(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"unsupported activation {activation!r}. Supported: {', '.join(_ACTIVATIONS)}")
    quantization = values.get("quantization_config")
    if quantization and not _is_of_cache_alone(quantization):
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        )
        raise UnsupportedModel(
            f"unsupported quantization_config (method {method!r}): "
            "use an unquantised safetensors checkpoint or a GGUF file"
        )
    if float(values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(
            f"unsupported partial_rotary_factor {values['partial_rotary_factor']}: only 1.0 is"
        )


def _sliding_window(values: Mapping[str, Any], model_type: str) -> int | None:
    """Mistral's window holds for every layer; Qwen's for some layers only, which is refused when on."""
    if model_type == "mistral":
        window = values.get("sliding_window", 4096)
        return None if window is None else int(window)
    if values.get("use_sliding_window") and "sliding_attention" in (
        values.get("layer_types") or ["sliding_attention"]
    ):
        raise UnsupportedModel(
            f"unsupported use_sliding_window=true for {model_type}: "
            "a window on some layers only is not computed here"
        )
    return None


def _required_int(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedModel(f"model config: {name} must be an integer, found {value!r}")
    return value
