"""The numbers of a decoder-only transformer that decide its cost: parameters, weight bytes, KV bytes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A dense Llama-family model: grouped-query attention, gated feed-forward, RMSNorm.

    ``num_extra_params_per_layer`` counts what a layer has beside its seven matrices and two norms: biases
    and Q/K norms. ``weight_element_bytes`` is one number for all parameters (2 for bf16, 1 for fp8, 0.5 for
    4 bits), ``kv_element_bytes`` that of the KV cache; change either with ``dataclasses.replace``.
    Raises ValueError if a number is not positive or the query heads do not divide into the KV heads.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    num_extra_params_per_layer: int = 0
    weight_element_bytes: float = 2.0
    kv_element_bytes: float = 2.0
    source: str = "set by the caller"

    def __post_init__(self) -> None:
        for field in (
            *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"),
            *("weight_element_bytes", "kv_element_bytes"),
        ):
            if not getattr(self, field) > 0:
                raise ValueError(f"{self.name}: {field} is {getattr(self, field)}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.name}: {self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads"
            )

    @property
    def query_size(self) -> int:
        """Elements of one token's queries in a layer, also of its attention output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in a layer; its values are as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_layer_matrix_params(self) -> int:
        """Parameters of one layer's matrices: Q, K, V, O, gate, up, down."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def num_head_params(self) -> int:
        """Parameters of the LM head, whether or not it is the embedding itself."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters; a tied LM head counts once."""
        per_layer = self.num_layer_matrix_params + 2 * self.hidden_size + self.num_extra_params_per_layer
        embeddings = self.num_head_params * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * per_layer + embeddings + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in memory."""
        return math.ceil(self.num_params * self.weight_element_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return math.ceil(2 * self.num_layers * self.kv_size * self.kv_element_bytes)


def _entry(
    hub_id: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    ffn: int,
    vocab: int,
    head_dim: int = 128,
    tied: bool = False,
    extra: int = 0,
) -> ModelGeometry:
    return ModelGeometry(
        name=hub_id.rpartition("/")[2],
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        num_extra_params_per_layer=extra,
        source=f"config.json of {hub_id} on the Hugging Face hub",
    )


# extra: Qwen2 has biases on Q, K and V; Qwen3 a norm of head_dim on Q and one on K.
GEOMETRIES = {
    entry.name.lower(): entry
    for entry in (
        _entry("meta-llama/Llama-3.1-8B", 32, 4096, (32, 8), 14336, 128256),
        _entry("meta-llama/Llama-3.1-70B", 80, 8192, (64, 8), 28672, 128256),
        _entry("meta-llama/Llama-3.2-1B", 16, 2048, (32, 8), 8192, 128256, head_dim=64, tied=True),
        _entry("meta-llama/Llama-3.2-3B", 28, 3072, (24, 8), 8192, 128256, tied=True),
        _entry("meta-llama/Llama-2-7b", 32, 4096, (32, 32), 11008, 32000),
        _entry("meta-llama/Llama-2-13b", 40, 5120, (40, 40), 13824, 32000),
        _entry("meta-llama/Llama-2-70b", 80, 8192, (64, 8), 28672, 32000),
        _entry("01-ai/Yi-34B", 60, 7168, (56, 8), 20480, 64000),
        _entry("mistralai/Mistral-7B-v0.3", 32, 4096, (32, 8), 14336, 32768),
        _entry("mistralai/Mistral-Nemo-Instruct-2407", 40, 5120, (32, 8), 14336, 131072),
        _entry("Qwen/Qwen2.5-0.5B", 24, 896, (14, 2), 4864, 151936, head_dim=64, tied=True, extra=1152),
        _entry("Qwen/Qwen2.5-7B", 28, 3584, (28, 4), 18944, 152064, extra=4608),
        _entry("Qwen/Qwen3-0.6B", 28, 1024, (16, 8), 3072, 151936, tied=True, extra=256),
        _entry("Qwen/Qwen3-14B", 40, 5120, (40, 8), 17408, 151936, extra=256),
        _entry("Qwen/Qwen3-32B", 64, 5120, (64, 8), 25600, 151936, extra=256),
        _entry("HuggingFaceTB/SmolLM2-135M", 30, 576, (9, 3), 1536, 49152, head_dim=64, tied=True),
        _entry("HuggingFaceTB/SmolLM2-360M", 32, 960, (15, 5), 2560, 49152, head_dim=64, tied=True),
        _entry("HuggingFaceTB/SmolLM2-1.7B", 24, 2048, (32, 32), 8192, 49152, head_dim=64, tied=True),
    )
}

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_VARIANTS = ("-instruct", "-chat", "-base", "-hf")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0, "float8_e5m2": 1.0}


def geometry(name_or_path: str | Path) -> ModelGeometry:
    """A model by name, by hub id, or from a ``config.json`` or the folder that holds one.

    Names are looked up in ``GEOMETRIES`` in any case, with or without the owner and a suffix such as
    ``-Instruct`` (same shape as its base). An existing path wins. ValueError lists the names.
    """
    path = Path(name_or_path).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        return from_config_file(config)
    key = str(name_or_path).strip().lower().rpartition("/")[2]
    while key not in GEOMETRIES:
        shorter = next((key.removesuffix(variant) for variant in _VARIANTS if key.endswith(variant)), None)
        if shorter is None:
            known = ", ".join(entry.name for entry in GEOMETRIES.values())
            raise ValueError(
                f"unknown model {str(name_or_path)!r}: no such config.json, and not one of: {known}; "
                "give the path of a config.json or make your own ModelGeometry(...)"
            )
        key = shorter
    return GEOMETRIES[key]


def from_config_file(path: str | Path) -> ModelGeometry:
    """``from_config`` of a JSON file, or of the ``config.json`` in a folder; errors name the file."""
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"holds a {type(config).__name__}, not an object")
        name = config.get("_name_or_path") or file.resolve().parent.name
        return from_config(config, name=str(name), source=f"config.json of {name}")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def from_config(
    config: Mapping[str, Any],
    name: str = "model",
    weight_element_bytes: float | None = None,
    kv_element_bytes: float | None = None,
    source: str = "a Hugging Face config",
) -> ModelGeometry:
    """The geometry in a Hugging Face model configuration: llama, mistral, qwen2 or qwen3.

    Bytes per element follow the configuration's dtype (2 where it states none) unless given. Raises
    ValueError, naming the field, for another family, mixture of experts, sliding-window attention, missing
    fields, and a quantised model without ``weight_element_bytes``.
    """
    family = _checked_family(config)
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    # Only Llama's defaults are the same for every model: as many KV heads as heads, heads that split hidden.
    kv_heads = heads if family == "llama" and config.get("num_key_value_heads") is None else None
    kv_heads = kv_heads or _number(config, "num_key_value_heads")
    if config.get("head_dim") is None and family != "qwen3" and hidden % heads == 0:
        head_dim = hidden // heads
    else:
        head_dim = _number(config, "head_dim")
    ffn = _number(config, "intermediate_size")
    dtype_bytes = _dtype_bytes(config)
    if weight_element_bytes is None and config.get("quantization_config"):
        raise ValueError("the model is quantised (quantization_config): give weight_element_bytes")
    return ModelGeometry(
        name=name,
        num_layers=_number(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=_number(config, "vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_extra_params_per_layer=_num_extra_params(config, family, hidden, heads, kv_heads, head_dim, ffn),
        weight_element_bytes=dtype_bytes if weight_element_bytes is None else weight_element_bytes,
        kv_element_bytes=dtype_bytes if kv_element_bytes is None else kv_element_bytes,
        source=source,
    )


def _checked_family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    experts = [key for key in _EXPERT_KEYS if (config.get(key) or 0) > 1]
    if experts or "moe" in str(family) or family == "mixtral":
        raise ValueError(
            f"{family!r} is a mixture of experts ({experts[0] if experts else 'by its model_type'}): a step "
            "reads only the weights of the experts its tokens reach, which this geometry does not describe"
        )
    if family not in _FAMILIES:
        raise ValueError(f"model_type is {family!r}; supported: {', '.join(_FAMILIES)}")
    # Qwen configurations state a window that use_sliding_window then switches off; Mistral's has no switch.
    if config.get("sliding_window") is not None and config.get("use_sliding_window", family == "mistral"):
        raise ValueError(
            f"sliding_window is {config['sliding_window']}: windowed attention is not described here; "
            "set it to null to treat every layer as full attention"
        )
    return family


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        stated = "missing" if value is None else f"{value!r}"
        raise ValueError(f"{key} is {stated}; a positive integer is needed")
    return value


def _dtype_bytes(config: Mapping[str, Any]) -> float:
    stated = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    size = _DTYPE_BYTES.get(str(stated).removeprefix("torch."))
    if size is None:
        raise ValueError(f"dtype is {stated!r}; known: {', '.join(_DTYPE_BYTES)}")
    return size


def _num_extra_params(
    config: Mapping[str, Any], family: str, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int
) -> int:
    """Biases and Q/K norms of one layer; Qwen2 always has Q, K, V biases and Qwen3 always the norms."""
    qkv = (heads + 2 * kv_heads) * head_dim
    attention = qkv if family == "qwen2" else (qkv + hidden) * bool(config.get("attention_bias"))
    feed_forward = (2 * ffn + hidden) * bool(config.get("mlp_bias"))
    return attention + feed_forward + (2 * head_dim if family == "qwen3" else 0)
