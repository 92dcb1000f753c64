from typing import Any

import pytest
import torch
from model_checkpoints import FAMILY, hf_model

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import UnsupportedModel
from pagedserve.engine.model.rope import RotaryTable, inverse_frequencies, rotate

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_defaults_of_a_config_that_leaves_fields_out() -> None:
    made = config()
    assert (made.num_kv_heads, made.head_dim, made.rope_theta, made.rope_scaling) == (4, 16, 10000.0, None)
    assert not made.tie_word_embeddings
    assert made.sliding_window is None


@pytest.mark.parametrize("name", FAMILY)
def test_parameter_count_is_that_of_transformers(name: str) -> None:
    model = hf_model(name)
    assert ModelConfig.from_hf(model.config.to_dict()).num_parameters == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("name", FAMILY)
def test_rope_frequencies_have_the_bits_of_transformers(name: str) -> None:
    model = hf_model(name)
    made = ModelConfig.from_hf(model.config.to_dict())
    frequencies = inverse_frequencies(made.head_dim, made.rope_theta, made.rope_scaling)
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    old = config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert old.rope_scaling is not None
    assert old.rope_scaling.kind == "llama3"
    linear = config(rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope_scaling is not None
    assert (linear.rope_scaling.kind, linear.rope_scaling.factor) == ("linear", 2.0)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    table = RotaryTable(inverse_frequencies(8, 100.0, None), 20, torch.device("cpu"))
    heads = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 19])
    rotated = rotate(heads, *table.at(positions))
    pairs = torch.complex(heads[..., :4].double(), heads[..., 4:].double())
    angles = positions[:, None, None].double() * inverse_frequencies(8, 100.0, None).double()
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated[..., :4].double(), expected.real, atol=1e-6, rtol=0)
    torch.testing.assert_close(rotated[..., 4:].double(), expected.imag, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"MixtralForCausalLM\. Supported: LlamaForCausalLM, Mistral",
        ),
        ({"architectures": None, "model_type": "gpt2"}, r"model_type 'gpt2'\. Supported"),
        ({"hidden_act": "gelu"}, r"activation 'gelu'\. Supported: silu"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            r"rope type 'yarn'\. Supported: default, linear",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"quantization_config": {"quant_method": "awq"}}, "method 'awq'.*unquantised safetensors"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3 KV heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"vocab_size": None}, "vocab_size must be an integer, found None"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64},
            "use_sliding_window=true for qwen2",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config(**changes)


def test_sliding_windows() -> None:
    mistral = ["MistralForCausalLM"]
    assert config(architectures=mistral, sliding_window=None).sliding_window is None
    assert config(architectures=mistral, sliding_window=32).sliding_window == 32
    assert (
        config(architectures=mistral).sliding_window == 4096
    )  # transformers' default when the key is absent
    assert config(architectures=["Qwen2ForCausalLM"], sliding_window=32).sliding_window is None


def test_kv_bytes_per_token() -> None:
    assert config(num_key_value_heads=2).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def quantization(**changes: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    made = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    return {**LLAMA, "quantization_config": {**made, **changes}}


def test_a_checkpoint_of_which_the_cache_alone_is_calibrated_is_whole() -> None:
    assert ModelConfig.from_hf(quantization()) == config()


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}},
    ],
)
def test_other_quantizations_stay_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="compressed-tensors"):
        ModelConfig.from_hf(quantization(**changes))
