"""Weights by name, one tensor at a time: what a model needs, and the sources that can give it.

Names and shapes are those of Hugging Face checkpoints. Only safetensors (here) and GGUF (``gguf``) are read:
a pickled checkpoint can run code when it is opened, so it is refused. Nothing is downloaded here.
"""

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import WeightsError
from pagedserve.engine.model.kv_scales import scale_names

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_INDEX = "model.safetensors.index.json"


class TensorSource(Protocol):
    """A set of named tensors. ``get`` may read from disk or dequantise; callers ask for each name once."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor there is, by name, without reading any."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, on the CPU, in whatever dtype it is stored."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a model of this configuration needs, in the order they are read."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * width, config.num_kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[name + ".weight"] = (rows, columns)
        if bias:
            shapes[name + ".bias"] = (rows,)

    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        linear(prefix + "self_attn.q_proj", q_size, hidden, config.qkv_bias)
        linear(prefix + "self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        linear(prefix + "self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        if config.head_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (width,)
            shapes[prefix + "self_attn.k_norm.weight"] = (width,)
        linear(prefix + "self_attn.o_proj", hidden, q_size, config.output_bias)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        linear(prefix + "mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(prefix + "mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(prefix + "mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, source: TensorSource) -> None:
    """Raise ``WeightsError`` naming tensors that are missing, unexpected or of another shape than expected.

    A tied ``lm_head.weight`` and stored rotary frequencies are redundant and allowed; scales of an eight-bit KV cache
    are read where there is one.
    """
    expected, found = expected_shapes(config), source.shapes()
    allowed = expected.keys() | {"lm_head.weight"} | scale_names(config.num_layers)
    problems = [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems += [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [
        f"unexpected {name} {list(shape)}"
        for name, shape in found.items()
        if name not in allowed and not name.endswith("rotary_emb.inv_freq")
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise WeightsError(f"weights do not fit the model config: {'; '.join(problems[:8])}{more}")


class SafetensorsSource:
    """A directory with safetensors files, or with shards and their index. Tensors are read when asked for.

    Raises ``WeightsError`` naming a shard that is missing, truncated or lacks a tensor that the index
    promises, and for a directory with only pickled weights.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        files, promised = _shards(folder)
        for path in files:
            self._open(path)
        absent = [f"{name} (in {shard})" for name, shard in promised.items() if name not in self._files]
        if absent:
            raise WeightsError(
                f"{folder / _INDEX} promises tensors that their shards lack: {', '.join(absent[:8])}"
            )

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                self._files[name] = file
                self._shapes[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise WeightsError(
                f"{path} is not a whole safetensors file ({error}); download it again"
            ) from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files to read, and which tensors an index promises in which of them."""
    index = folder / _INDEX
    if index.exists():
        try:
            promised: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise WeightsError(f"{index} is not a safetensors index ({error!r})") from error
        shards = sorted(set(promised.values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise WeightsError(
                f"missing shard {', '.join(missing)} ({len(missing)} of {len(shards)}) in {folder}; "
                "download it again"
            )
        return [folder / shard for shard in shards], promised
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(_no_weights(folder))
    return files, {}


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if not pickled:
        return f"{folder} has no *.safetensors file"
    return (
        f"{folder} has pickled weights only ({', '.join(pickled[:3])}); loading them can run code, so they "
        "are refused. Convert them to safetensors (save_pretrained of a recent transformers writes that)"
    )


class RandomSource:
    """Seeded random weights in the shapes of ``config``; a tensor depends on the seed and its name alone.

    Matrices keep the scale of their input (standard deviation 1/sqrt(columns)) and embeddings have scale 1, so
    that logits differ enough for greedy output not to hang on rounding, and tokens matter.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._expected = expected_shapes(config)
        self._seed = seed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._expected)

    def get(self, name: str) -> torch.Tensor:
        shape = self._expected[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        if name == "model.embed_tokens.weight":
            return noise
        if len(shape) == 2:
            return noise.div_(math.sqrt(shape[1]))
        return noise.mul_(0.1) if name.endswith(".bias") else noise.mul_(0.1).add_(1.0)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in turn, for saving a checkpoint."""
        return ((name, self.get(name)) for name in self._expected)


def random_weights(config: ModelConfig, seed: int) -> RandomSource:
    """Return a source of seeded random weights, for tests and benchmarks."""
    return RandomSource(config, seed)
