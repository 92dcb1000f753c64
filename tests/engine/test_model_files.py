import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedserve.engine.model import tokenizer as tokenizer_module
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import ModelNotFound, NotEnoughMemory, TokenizerError
from pagedserve.engine.model.files import ModelFiles, resolve_model
from pagedserve.engine.model.load import load_model
from pagedserve.engine.model.placement import (
    available_bytes,
    check_device,
    check_memory,
    choose_dtype,
    cpu_bfloat16_flag,
    weight_bytes,
)
from pagedserve.engine.model.tokenizer import eos_token_ids, load_tokenizer

GEOMETRY = ModelConfig("llama", 1000, 64, 96, 2, 4, 2, 16, 128, 1e-5, 1e4, tie_word_embeddings=True)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<end>": 1, "one": 2, "two": 3}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")


@pytest.mark.parametrize(
    "name", ["no-such-model", "./nowhere", "/no/such/folder", "a/b/c", Path("owner/name")]
)
def test_a_name_that_is_nothing_says_what_it_could_be(name: str | Path) -> None:
    with pytest.raises(ModelNotFound, match=r"not an alias \(smollm2-135m\), and not a hub repository"):
        resolve_model(name)


def test_a_hub_repository_that_cannot_be_reached_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(ModelNotFound, match=r"'owner/name' on disk, and the Hugging Face hub.*or an alias"):
        resolve_model("owner/name")


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_fetched_from_the_hub_only_where_they_are_wanted(
    weights: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name", weights=weights).path == tmp_path
    (patterns,) = asked
    assert {"*.json", "tokenizer.model"} <= set(patterns)
    assert ("*.safetensors" in patterns) == weights


def test_what_is_on_disk_comes_before_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model("smollm2-135m") == ModelFiles("smollm2-135m", "safetensors", Path("smollm2-135m"))


def test_a_single_weights_file_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="give the directory that holds the model"):
        resolve_model(path)


def test_end_of_text_ids_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    files = ModelFiles("x", "safetensors", tmp_path)
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("two one") == [3, 2]
    assert eos_token_ids(files, tokenizer) == {1, 7, 8, 9}
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_token_ids(files, tokenizer) == {1, 7}


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no tokenizer \(tokenizer\.json"):
        load_tokenizer(ModelFiles("x", "safetensors", tmp_path))


class Conversions:
    """Stands for the slow conversion of a GGUF file's tokenizer, and for what the file says ends a text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", self.from_pretrained)
        monkeypatch.setattr(tokenizer_module, "GgufSource", lambda path: self)

    def from_pretrained(self, folder: str, **settings: object) -> PreTrainedTokenizerFast:
        assert settings["trust_remote_code"] is False
        if "gguf_file" in settings:
            self.count += 1
            return word_tokenizer()
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def end_token_ids(self) -> list[int]:
        return [1, 5]


def test_a_gguf_tokenizer_is_converted_once_and_again_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions = Conversions(monkeypatch)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"first")
    files = ModelFiles("m", "gguf", path)
    for _ in range(3):
        tokenizer = load_tokenizer(files)
        assert tokenizer.encode("one two") == [2, 3]
        assert eos_token_ids(files, tokenizer) == {1, 5}
    assert conversions.count == 1
    path.write_bytes(b"another file")
    load_tokenizer(files)
    assert conversions.count == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "m.tokenizer"]


def test_a_gguf_tokenizer_works_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions = Conversions(monkeypatch)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"first")

    def refuse(**settings: object) -> str:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(tokenizer_module.tempfile, "mkdtemp", refuse)
    files = ModelFiles("m", "gguf", path)
    assert load_tokenizer(files).encode("two") == [3]
    assert load_tokenizer(files).encode("two") == [3]
    assert conversions.count == 2


def test_dtype_is_bfloat16_only_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True}, raising=False
    )
    assert cpu_bfloat16_flag() == "avx512_bf16"
    choice = choose_dtype()
    assert choice.dtype == torch.bfloat16
    assert "avx512_bf16" in choice.reason
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False}, raising=False
    )
    choice = choose_dtype()
    assert choice.dtype == torch.float32
    assert "no bfloat16" in choice.reason


def test_a_requested_dtype_is_obeyed_and_an_unknown_one_refused() -> None:
    assert choose_dtype("bfloat16").dtype == torch.bfloat16
    assert choose_dtype(torch.float16).dtype == torch.float16
    with pytest.raises(ValueError, match="unknown dtype 'int4'; there are: auto, float32, bfloat16, float16"):
        choose_dtype("int4")


def test_needed_memory_counts_the_packed_head_of_a_tied_model() -> None:
    assert weight_bytes(GEOMETRY, torch.float32, "cpu") == 4 * (GEOMETRY.num_parameters + 64_000)
    assert weight_bytes(GEOMETRY, torch.bfloat16, "cuda") == 2 * GEOMETRY.num_parameters


def test_available_memory_is_told_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_bytes("cpu")
    assert free is not None
    assert 1 << 20 < free < 1 << 50
    assert free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes("meta") is None
    check_memory(GEOMETRY, torch.float32, "cpu")
    needed = weight_bytes(GEOMETRY, torch.float32, "cpu")
    monkeypatch.setattr("pagedserve.engine.model.placement.available_bytes", lambda device: needed - 1)
    with pytest.raises(NotEnoughMemory, match=f"need {needed:,} bytes .* {needed - 1:,} bytes"):
        check_memory(GEOMETRY, torch.float32, "cpu")


def test_a_control_group_limit_counts(tmp_path: Path) -> None:
    from pagedserve.engine.model.placement import _cgroup_left

    assert _cgroup_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert _cgroup_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _cgroup_left(tmp_path) == 600
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250\nactive_file 50\n")
    assert _cgroup_left(tmp_path) == 850, "what was read of files once is given up when it must be"


@pytest.mark.parametrize("text", ["", "not JSON", "{}", '{"model": {"type": "None"}}'])
def test_a_malformed_tokenizer_says_so(text: str, tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r": the tokenizer cannot be read \(.*\); fetch or convert"):
        load_tokenizer(ModelFiles("x", "safetensors", tmp_path))


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("gpu", 0, "device 'gpu' is none that torch knows; use cpu, cuda or cuda:N"),
        ("cuda", 0, "device cuda: torch .* finds no CUDA device; use cpu"),
        ("cuda:2", 2, "device cuda:2: there are 2 CUDA devices, the last is cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=words):
        load_model("no-such-model", device=device)
    check_device("cpu")
    if count:
        check_device("cuda:1")
