"""The tokenizer of a model, and the ids that end its output.

Hugging Face's tokenizer does the encoding. Building one from a GGUF file takes seconds (about 3.5 s for
49,152 tokens, against 0.1 s for a saved one), so the result is kept in a folder beside the file.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from pagedserve.engine.model.errors import ModelNotFound, TokenizerError
from pagedserve.engine.model.files import ModelFiles
from pagedserve.engine.model.gguf import GgufSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SOURCE = "source.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_tokenizer(files: ModelFiles) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of ``files``, never running remote code. Raises ``ModelNotFound`` without one and
    ``TokenizerError`` if its files cannot be read.
    """
    if files.kind == "gguf":
        cached = _cached_folder(files.path)
        if not _is_current(cached, files.path):
            return _convert(files.path, cached)
        return _from_folder(cached)
    if not any((files.path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelNotFound(f"{files.path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy it there")
    return _from_folder(files.path)


def eos_token_ids(files: ModelFiles, tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Every id that ends the output: of the generation config, the model config and the tokenizer."""
    ids: set[int] = set()
    if files.kind == "gguf":
        marker = _cached_folder(files.path) / _SOURCE
        sources: list[dict[str, Any] | None] = []
        if marker.is_file():
            sources.append(json.loads(marker.read_text(encoding="utf-8")))
    else:
        sources = [files.read_json("generation_config.json"), files.read_json("config.json")]
    for source in sources:
        found = (source or {}).get("eos_token_id")
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _from_folder(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: the tokenizers library raises bare exceptions
        reason = " ".join(str(error).split()) or "no reason given"
        raise TokenizerError(
            f"{folder}: the tokenizer cannot be read ({type(error).__name__}: {shorten(reason, 200)}); "
            "fetch or convert its files again"
        ) from error


def _cached_folder(gguf: Path) -> Path:
    return gguf.with_suffix(".tokenizer")


def _identity(gguf: Path) -> dict[str, int]:
    """What tells a replaced file from the one that was converted."""
    status = gguf.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_current(folder: Path, gguf: Path) -> bool:
    try:
        kept = json.loads((folder / _SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return {key: kept.get(key) for key in ("bytes", "mtime_ns")} == _identity(gguf)


def _convert(gguf: Path, folder: Path) -> "PreTrainedTokenizerBase":
    """Build the tokenizer from the GGUF file and keep it, where the folder can be written."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
    source = {**_identity(gguf), "eos_token_id": GgufSource(gguf).end_token_ids()}
    try:
        temporary = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=gguf.parent))
    except OSError:
        return tokenizer
    try:
        tokenizer.save_pretrained(str(temporary))
        (temporary / _SOURCE).write_text(json.dumps(source), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # another process was first, or the disk is full
    return tokenizer
