import json
import shutil
from pathlib import Path

import pytest
import torch
from model_checkpoints import DictSource, chunked_logits, hf_logits, hf_model, our_model, prompt
from safetensors.torch import load_file, save_file

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel, WeightsError
from pagedserve.engine.model.load import load_model
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import SafetensorsSource, check_tensors, expected_shapes, random_weights


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    hf_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    hf_model("llama").save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def broken(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint that a test may damage."""
    return Path(shutil.copytree(sharded, tmp_path / "broken"))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_saved_checkpoint_gives_the_logits_of_the_model(kind: str, request: pytest.FixtureRequest) -> None:
    loaded = load_model(request.getfixturevalue(kind), dtype="float32")
    assert loaded.files.kind == "safetensors"
    tokens = prompt(20)
    logits = chunked_logits(loaded.model, tokens, 20)
    torch.testing.assert_close(logits, hf_logits("llama", tokens), atol=4e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
def test_other_members_of_the_family_load_from_disk(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    logits = chunked_logits(load_model(str(tmp_path), dtype="float32").model, prompt(9), 9)
    torch.testing.assert_close(logits, hf_logits(name, prompt(9)), atol=4e-5, rtol=0)


def test_a_missing_shard_is_named(broken: Path) -> None:
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsError, match=f"missing shard {shard.name}"):
        load_model(broken)


def test_a_truncated_shard_is_named(broken: Path) -> None:
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=f"{shard.name} is not a whole safetensors file"):
        load_model(broken)


def test_a_tensor_that_its_shard_lacks_is_named(broken: Path) -> None:
    index = broken / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    shard = contents["weight_map"]["model.norm.weight"]
    tensors = load_file(broken / shard)
    del tensors["model.norm.weight"]
    save_file(tensors, broken / shard)
    with pytest.raises(WeightsError, match=rf"model\.norm\.weight \(in {shard}\)"):
        load_model(broken)


def test_a_broken_index_is_named(broken: Path) -> None:
    (broken / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"index\.json is not a safetensors index"):
        load_model(broken)


def state(name: str) -> dict[str, torch.Tensor]:
    return dict(hf_model(name).state_dict())


def test_missing_unexpected_and_misshapen_tensors_are_named() -> None:
    config = ModelConfig.from_hf(hf_model("llama").config.to_dict())
    tensors = state("llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    tensors["model.norm.weight"] = torch.zeros(47)
    with pytest.raises(WeightsError) as caught:
        check_tensors(config, DictSource(tensors))
    message = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight [80, 48]" in message
    assert "unexpected model.layers.0.self_attn.q_proj.bias [48]" in message
    assert "model.norm.weight has shape [47], expected [48]" in message
    with pytest.raises(WeightsError, match="missing"):
        Model(config, DictSource(tensors), dtype=torch.float32)


def test_an_untied_model_needs_its_head_and_a_tied_one_ignores_it() -> None:
    untied, tied = state("llama"), state("llama-tied")
    del untied["lm_head.weight"]
    with pytest.raises(WeightsError, match=r"missing lm_head\.weight \[199, 48\]"):
        check_tensors(ModelConfig.from_hf(hf_model("llama").config.to_dict()), DictSource(untied))
    tied["lm_head.weight"] = torch.zeros(199, 48)
    check_tensors(ModelConfig.from_hf(hf_model("llama-tied").config.to_dict()), DictSource(tied))


def test_a_long_list_of_problems_is_cut() -> None:
    config = ModelConfig.from_hf(hf_model("llama").config.to_dict())
    with pytest.raises(WeightsError, match=f"and {len(expected_shapes(config)) - 8} more"):
        check_tensors(config, DictSource({}))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_pickled_weights_are_refused_unopened(suffix: str, single: Path, tmp_path: Path) -> None:
    shutil.copy(single / "config.json", tmp_path)
    pickled = tmp_path / f"pytorch_model.{suffix}"
    pickled.write_bytes(b"not even a pickle")
    with pytest.raises(WeightsError, match=r"pickled weights only.*Convert them to safetensors"):
        load_model(tmp_path)
    with pytest.raises(WeightsError, match=r"pickled checkpoint.*Convert it to safetensors"):
        load_model(pickled)


def test_pickled_weights_beside_safetensors_are_left_alone(single: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(single, tmp_path / "both"))
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert SafetensorsSource(folder).shapes() == SafetensorsSource(single).shapes()


def test_folders_without_a_model_say_what_is_missing(single: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json and no GGUF file"):
        load_model(tmp_path)
    shutil.copy(single / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors file"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"config\.json is not valid JSON"):
        load_model(tmp_path)


def test_too_little_memory_is_found_before_anything_is_read(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedserve.engine.model.placement.available_bytes", lambda device: 1000)
    with pytest.raises(
        NotEnoughMemory, match=r"need 289,728 bytes .*float32; 1,000 bytes .*available on cpu"
    ):
        load_model(single, dtype="float32")


def test_random_weights_depend_on_seed_and_name_only() -> None:
    config = our_model("qwen3").config
    first, again, other = random_weights(config, 1), random_weights(config, 1), random_weights(config, 2)
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(first.get(name), again.get(name))
    assert not torch.equal(first.get(name), other.get(name))
    assert not torch.equal(first.get(name), first.get("model.layers.1.mlp.down_proj.weight"))
    assert first.shapes() == expected_shapes(config)


def test_random_weights_give_lively_logits() -> None:
    config = our_model("llama").config
    model = Model(config, random_weights(config, 3), dtype=torch.float32)
    logits = chunked_logits(model, prompt(30), 30)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.05
    assert len(set(logits.argmax(-1).tolist())) > 10
