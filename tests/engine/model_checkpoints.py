"""Tiny random models for the model tests: the Hugging Face model, its files, and ours from the same weights."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.kernels.kv_cache import KVCache

VOCABULARY = 199
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 20},
    "llama-biases-llama3": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": _LLAMA3,
    },
    "llama-one-kv-head-linear": {"model_type": "llama", "num_key_value_heads": 1, "rope_parameters": _LINEAR},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 6},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


class DictSource:
    """A state dict as a ``TensorSource``."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@cache
def hf_model(name: str) -> Any:
    """A float32 model of ``FAMILY`` with seeded random weights, biases and norms included."""
    settings = {**_COMMON, **FAMILY[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if parameter_name.endswith("bias") else 1.0, 0.2)
    return model


def our_model(name: str, attention: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    hf = hf_model(name)
    config = ModelConfig.from_hf(hf.config.to_dict())
    return Model(config, DictSource(dict(hf.state_dict())), dtype=dtype, attention=attention)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_logits(name: str, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [n, vocabulary] of every position, computed by transformers in one pass."""
    model = hf_model(name)
    if dtype != torch.float32:
        model = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def dirty_cache(model: Model, num_blocks: int, block_size: int) -> KVCache:
    """A cache whose every slot is NaN until a token is written to it."""
    kv = model.make_cache(num_blocks, block_size)
    kv.data[:, : kv.num_blocks] = float("nan")
    return kv


def scattered_blocks(num_blocks: int, count: int, seed: int = 0) -> list[int]:
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return order[:count].tolist()


def chunked_logits(model: Model, tokens: Sequence[int], chunk: int, block_size: int = 4) -> torch.Tensor:
    """Logits of every position, computed ``chunk`` tokens at a time on scattered blocks of a dirty cache."""
    num_blocks = len(tokens) // block_size + 4
    kv, blocks = dirty_cache(model, num_blocks, block_size), scattered_blocks(num_blocks, num_blocks - 2)
    rows = []
    for start in range(0, len(tokens), chunk):
        part = SequenceChunk(tokens[start : start + chunk], start, blocks)
        rows.append(model.logits(model.forward(make_batch([part], block_size), kv)))
    return torch.cat(rows)


def hf_continuation(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What transformers' model generates greedily behind the prompt, its end marks ignored."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())
