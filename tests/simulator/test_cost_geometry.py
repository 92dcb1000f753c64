"""Model geometry: parameter counts against published totals, Hugging Face configurations, clear refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedserve.simulator.geometry import GEOMETRIES, ModelGeometry, from_config, from_config_file, geometry

# Totals as the Hugging Face hub shows them (safetensors metadata); tied LM heads counted once.
PUBLISHED_PARAMS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-2-7b": 6_738_415_616,
    "Llama-2-13b": 13_015_864_320,
    "Llama-2-70b": 68_976_648_192,
    "Yi-34B": 34_388_917_248,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value != "absent"}


def test_every_named_model_has_the_published_parameter_count() -> None:
    assert {entry.name: entry.num_params for entry in GEOMETRIES.values()} == PUBLISHED_PARAMS


def test_bytes_of_llama_8b_by_hand() -> None:
    llama = geometry("Llama-3.1-8B")
    assert llama.weight_bytes == 16_060_522_496
    # 2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes
    assert llama.kv_bytes_per_token == 131_072
    eight_bit = replace(llama, weight_element_bytes=0.5, kv_element_bytes=1)
    assert eight_bit.weight_bytes == 4_015_130_624
    assert eight_bit.kv_bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b"),
        ("llama-2-70b-HF", "Llama-2-70b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("Qwen/Qwen3-0.6B-Base", "Qwen3-0.6B"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo-Instruct-2407"),
    ],
)
def test_names_are_found_with_owner_case_and_variant(asked: str, name: str) -> None:
    assert geometry(asked).name == name


def test_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"'gpt-5'.*Llama-3\.1-8B.*SmolLM2-135M"):
        geometry("gpt-5")


@pytest.mark.parametrize(
    ("changes", "num_params"),
    # Totals of transformers 5.24 models built from the same configurations.
    [
        ({}, 74_560),
        ({"attention_bias": True, "mlp_bias": True}, 75_456),
        ({"model_type": "mistral", "sliding_window": None}, 74_560),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, 74_816),
        ({"model_type": "qwen3", "head_dim": 32, "attention_bias": True}, 99_904),
        ({"tie_word_embeddings": True}, 74_560 - 6_400),
        ({"num_key_value_heads": "absent"}, 74_560 + 2 * 2 * 64 * 32),
    ],
)
def test_configurations_count_like_transformers(changes: dict[str, Any], num_params: int) -> None:
    assert from_config(tiny_config(**changes)).num_params == num_params


def test_dtype_sets_the_bytes_and_arguments_override_it() -> None:
    assert from_config(tiny_config(torch_dtype="float32")).kv_element_bytes == 4
    assert from_config(tiny_config(torch_dtype="absent", dtype="float16")).weight_element_bytes == 2
    mixed = from_config(tiny_config(), weight_element_bytes=0.5, kv_element_bytes=1)
    assert (mixed.weight_element_bytes, mixed.kv_element_bytes) == (0.5, 1)
    quantised = tiny_config(quantization_config={"bits": 4})
    with pytest.raises(ValueError, match="weight_element_bytes"):
        from_config(quantised)
    assert from_config(quantised, weight_element_bytes=0.5).weight_element_bytes == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2'; supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": "absent"}, "model_type is None"),
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, r"mixture of experts \(num_experts\)"),
        ({"num_local_experts": 8}, r"mixture of experts \(num_local_experts\)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096"),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True},
            "sliding_window is 4096",
        ),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"model_type": "qwen2", "num_key_value_heads": "absent"}, "num_key_value_heads is missing"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3"),
        ({"torch_dtype": "int3"}, "dtype is 'int3'"),
    ],
)
def test_configurations_that_cannot_be_described_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(tiny_config(**changes))


def test_config_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(tiny_config()))
    by_file, by_folder = geometry(file), geometry(str(folder))
    assert by_file == by_folder == from_config_file(folder)
    assert (by_file.name, by_file.num_params) == ("my-model", 74_560)


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "t5"}'])
def test_errors_in_a_config_file_name_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: "):
        geometry(file)


def test_a_geometry_of_ones_own_is_checked() -> None:
    with pytest.raises(ValueError, match="num_layers is 0"):
        ModelGeometry("mine", 0, 64, 4, 2, 16, 96, 100)
