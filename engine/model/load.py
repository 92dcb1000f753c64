"""From a name to a model that runs: find the files, read the configuration, check memory, read weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import ModelNotFound
from pagedserve.engine.model.files import ModelFiles, resolve_model
from pagedserve.engine.model.gguf import GgufSource
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.placement import DtypeChoice, check_device, check_memory, choose_dtype
from pagedserve.engine.model.weights import SafetensorsSource, TensorSource, check_tensors
from pagedserve.engine.parallel.communicator import ALONE, Communicator
from pagedserve.engine.parallel.shards import Shard, shard_config


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with where it came from and why it has its dtype."""

    model: Model
    files: ModelFiles
    dtype_choice: DtypeChoice


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without its weights: what its tokenizer and its limits are read from."""

    config: ModelConfig
    files: ModelFiles


def load_outline(
    name_or_path: str | Path, *, home: Path | None = None, progress: bool = True
) -> ModelOutline:
    """Find a model and read its configuration; a directory need not hold weights. Errors as of `load_model`."""
    files = resolve_model(name_or_path, home=home, progress=progress, weights=False)
    return ModelOutline(GgufSource(files.path).config if files.kind == "gguf" else _config(files), files)


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    attention: str = "auto",
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    home: Path | None = None,
    progress: bool = True,
    shard: Shard | None = None,
    communicator: Communicator = ALONE,
) -> LoadedModel:
    """Load a model by directory, GGUF file, alias or hub repository.

    ``dtype`` is auto, float32, bfloat16 or float16; ``home`` overrides the cache folder of aliases;
    ``progress`` shows a bar while fetching; ``kv_cache_dtype``, ``shard`` and ``communicator`` are
    `Model`'s. Raises a kind of
    ``ModelError`` that names what is wrong with the model, and ``ValueError`` for an option, before memory is
    filled.
    """
    check_device(device)
    files = resolve_model(name_or_path, home=home, progress=progress)
    config, source = open_weights(files)
    choice = choose_dtype(dtype, device)
    check_tensors(config, source)
    check_memory(config if shard is None else shard_config(config, shard), choice.dtype, device)
    model = Model(
        config,
        source,
        dtype=choice.dtype,
        device=device,
        attention=attention,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        shard=shard,
        communicator=communicator,
    )
    return LoadedModel(model, files, choice)


def open_weights(files: ModelFiles) -> tuple[ModelConfig, TensorSource]:
    """Read the configuration of ``files`` and open their tensors without reading them."""
    if files.kind == "gguf":
        source = GgufSource(files.path)
        return source.config, source
    return _config(files), SafetensorsSource(files.path)


def _config(files: ModelFiles) -> ModelConfig:
    values = files.read_json("config.json")
    if values is None:
        raise ModelNotFound(f"{files.path} has no config.json")
    return ModelConfig.from_hf(values)
