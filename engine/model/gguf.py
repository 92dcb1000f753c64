"""Reading a GGUF file: its configuration and its tensors, dequantised, under Hugging Face names.

The format is llama.cpp's; its Python package parses the file and dequantises blocks of its types. Ours is
the mapping of names and metadata, and undoing the row order in which ``llama`` files keep query and key
projections (pairs to rotate lie next to each other there, half a head apart here).
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import UnsupportedModel, WeightsError
from pagedserve.engine.model.rope import RopeScaling

SUPPORTED_GGUF = ("llama", "qwen2", "qwen3")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """One GGUF file as a ``TensorSource`` with a configuration. Tensors come out as float32.

    Raises ``WeightsError`` for a file that does not parse, ``UnsupportedModel`` for an architecture, rope
    scaling or expert layer that is not computed here.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, KeyError, IndexError) as error:
            raise WeightsError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error
        self.path = path
        self.architecture = str(self._value("general.architecture", ""))
        if self.architecture not in SUPPORTED_GGUF:
            raise UnsupportedModel(
                f"unsupported GGUF architecture {self.architecture!r} in {path.name}. "
                f"Supported: {', '.join(SUPPORTED_GGUF)}"
            )
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._names = {_hf_name(name): name for name in self._tensors if name != "rope_freqs.weight"}
        self.config = self._read_config()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            hf: tuple(int(n) for n in reversed(self._tensors[name].shape)) for hf, name in self._names.items()
        }

    def get(self, name: str) -> torch.Tensor:
        tensor = self._dequantised(self._names[name])
        if self.architecture == "llama" and ".self_attn.q_proj." in name:
            return _unpermute(tensor, self.config.num_heads)
        if self.architecture == "llama" and ".self_attn.k_proj." in name:
            return _unpermute(tensor, self.config.num_kv_heads)
        return tensor

    def end_token_ids(self) -> list[int]:
        """Ids that end a text or a turn, as the file's tokenizer metadata names them."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = (self._value(key, None) for key in keys)
        return sorted({int(value) for value in found if value is not None})

    def _dequantised(self, name: str) -> torch.Tensor:
        import gguf
        import numpy as np

        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise WeightsError(
                f"{self.path.name}: {name} is stored as {tensor.tensor_type.name}, which the gguf package "
                "cannot dequantise; use another quantisation (Q4_0 to Q8_0, K-quants, F16, BF16, F32)"
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _value(self, key: str, default: Any) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _read_config(self) -> ModelConfig:
        get = partial(self._required, self.architecture)
        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        head_dim = int(self._value(f"{self.architecture}.attention.key_length", hidden // heads))
        if int(self._value(f"{self.architecture}.expert_count", 0)):
            raise UnsupportedModel(f"{self.path.name} is a mixture of experts, which is not computed here")
        rotated = int(self._value(f"{self.architecture}.rope.dimension_count", head_dim))
        if rotated != head_dim:
            raise UnsupportedModel(
                f"{self.path.name} rotates {rotated} of {head_dim} numbers of a head; all are, here"
            )
        window = self._value(f"{self.architecture}.attention.sliding_window", None)
        return ModelConfig(
            model_type=self.architecture,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            intermediate_size=int(get("feed_forward_length")),
            num_layers=int(get("block_count")),
            num_heads=heads,
            num_kv_heads=int(self._value(f"{self.architecture}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            max_position_embeddings=int(get("context_length")),
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._value(f"{self.architecture}.rope.freq_base", 10000.0)),
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_down.bias" in self._tensors,
            head_norm="blk.0.attn_q_norm.weight" in self._tensors,
            sliding_window=None if window is None else int(window),
        )

    def _required(self, architecture: str, key: str) -> Any:
        value = self._value(f"{architecture}.{key}", None)
        if value is None:
            raise WeightsError(f"{self.path.name} lacks the metadata {architecture}.{key}")
        return value

    def _rope_scaling(self) -> RopeScaling | None:
        kind = str(self._value(f"{self.architecture}.rope.scaling.type", "none"))
        if "rope_freqs.weight" in self._tensors:
            return RopeScaling(kind="factors", factors=tuple(self._dequantised("rope_freqs.weight").tolist()))
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling(
                kind="linear", factor=float(self._required(self.architecture, "rope.scaling.factor"))
            )
        raise UnsupportedModel(
            f"unsupported rope scaling {kind!r} in {self.path.name}. Supported: none, linear, llama3"
        )


def _hf_name(name: str) -> str:
    """Translate a GGUF tensor name; one without a counterpart stays, and is then reported as unexpected."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: row 2i + j of a head goes to row i + j * head_dim / 2."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
