"""A model of a few thousand random weights and a token for every byte: the whole engine without a download."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import random_weights

NAME = "tiny random Llama"
NUM_TOKENS = 256
MAX_MODEL_LEN = 2048
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": NUM_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def tiny_model(seed: int = 0, device: torch.device | str = "cpu") -> tuple[Model, Vocabulary]:
    """The model in float32, and its vocabulary; its text is noise, equal for equal seeds."""
    config = ModelConfig.from_hf(_CONFIG)
    model = Model(config, random_weights(config, seed), dtype=torch.float32, device=device)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pieces = TokenPieces(tokenizer)
    return model, Vocabulary(NUM_TOKENS, frozenset(), pieces, lambda text: tokenizer.encode(text).ids)
