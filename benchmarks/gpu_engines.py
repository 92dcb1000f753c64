"""Engines around models of true shapes with random weights, made on the device; no files, no network."""

from __future__ import annotations

import gc
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_part import Part
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.engine import Engine
from pagedserve.engine.graphs import DecodeGraphs, make_graphs
from pagedserve.engine.heap import settle_heap
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.kv_memory import plan_num_blocks
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import expected_shapes
from pagedserve.engine.runner import ModelRunner
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits, policy

BLOCK_SIZE = 16
POLICY = "vllm_v1"
SCALE = 0.02
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
}
FULL_LIMITS = Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8448, block_size=BLOCK_SIZE)
TINY_LIMITS = Limits(
    max_num_batched_tokens=64, max_num_seqs=4, max_model_len=128, block_size=BLOCK_SIZE, num_blocks=40
)


class DeviceSource:
    """Normal weights of a small scale in bfloat16, norms of ones, made where they are needed; `TensorSource`."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._expected, self._device = expected_shapes(config), device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._expected)

    def get(self, name: str) -> torch.Tensor:
        shape = self._expected[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        made = torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=generator)
        return made.mul_(SCALE)


def byte_vocabulary(size: int) -> Vocabulary:
    """A token for every byte and, beyond, words of a number each: every id has a text; no EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: index for index, char in enumerate(alphabet)}
    ids |= {f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}w{index}": index for index in range(len(ids), size)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(size, frozenset(), TokenPieces(tokenizer), lambda text: tokenizer.encode(text).ids)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with its vocabulary, a KV cache that every engine on it uses, and graphs if the device has them."""

    name: str
    model: Model
    vocabulary: Vocabulary
    limits: Limits
    kv: KVCache
    graphs: DecodeGraphs | None

    @contextmanager
    def engine(self, depth: int, has_graphs: bool, *, record: bool) -> Iterator[Engine[ModelRunner]]:
        """A fresh engine, closed at the end."""
        engine = Engine(
            self.model,
            self.vocabulary,
            policy(POLICY),
            self.limits,
            overlap_depth=depth,
            seed=0,
            kv=self.kv,
            record=record,
        )
        engine.runner.graphs = self.graphs if has_graphs else None
        try:
            yield engine
        finally:
            engine.close()

    @property
    def facts(self) -> dict[str, Any]:
        """What was made, as plain values."""
        return {
            "model": self.name,
            "policy": POLICY,
            "attention": self.model.attention.name,
            "num_blocks": self.limits.num_blocks,
            "block_size": self.limits.block_size,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "max_model_len": self.limits.max_model_len,
            "kv_gib": self.kv.num_bytes / (1 << 30),
            "graph_sizes": [] if self.graphs is None else list(self.graphs.sizes),
        }


def make_bench(part: Part, name: str) -> Bench:
    """Make model, cache and graphs; how long each took is a fact of the part."""
    marks = [time.monotonic()]
    config = ModelConfig.from_hf(CONFIGS[name])
    limits = TINY_LIMITS if part.is_tiny else FULL_LIMITS
    model = Model(
        config,
        DeviceSource(config, part.device),
        dtype=torch.float32 if part.device == "cpu" else torch.bfloat16,
        device=part.device,
        attention="triton",
        max_model_len=limits.max_model_len,
    )
    vocabulary = byte_vocabulary(config.vocab_size)
    marks.append(time.monotonic())
    if part.device != "cpu":
        num_blocks, why = plan_num_blocks(model, limits, None, None, has_graphs=True)
        limits = replace(limits, num_blocks=num_blocks)
        part.findings.facts["memory"] = why
    kv = model.make_cache(limits.num_blocks, limits.block_size)
    marks.append(time.monotonic())
    graphs = _graphs(part, model, kv, limits)
    marks.append(time.monotonic())
    bench = Bench(name, model, vocabulary, limits, kv, graphs)
    names = ("weights_s", "memory_s", "graphs_s")
    spent = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
    part.findings.facts["engine"] = bench.facts | spent
    part.findings.save()
    settle_heap()
    return bench


def _graphs(part: Part, model: Model, kv: KVCache, limits: Limits) -> DecodeGraphs | None:
    """The device's graphs; in a rehearsal on a CPU, the functions themselves, run again on the same buffers."""
    if part.device != "cpu":
        graphs = make_graphs(model, kv, limits.max_num_seqs, limits.max_model_len)
    else:
        graphs = DecodeGraphs(model, kv, (1, 2, 4), limits.max_model_len, lambda run: run)
    if graphs is None:
        part.findings.fail("the model made no CUDA graphs on this device")
        return None
    for _ in graphs.record():
        pass
    return graphs


def free_memory(device: str) -> None:
    """Give back what no object holds any more."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
