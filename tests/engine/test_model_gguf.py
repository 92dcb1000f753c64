from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_checkpoints import chunked_logits, hf_logits, hf_model, prompt

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import ModelNotFound, UnsupportedModel, WeightsError
from pagedserve.engine.model.gguf import GgufSource
from pagedserve.engine.model.load import load_model
from pagedserve.engine.model.rope import inverse_frequencies

Q8 = gguf.GGMLQuantizationType.Q8_0
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key rows of ``llama`` models."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, name: str, *, architecture: str | None = None, quantize: bool = False) -> Path:
    """Write a model of the family as a GGUF file, as llama.cpp's converter would."""
    model = hf_model(name)
    config = ModelConfig.from_hf(model.config.to_dict())
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_eos_token_id(2)
    if config.rope_scaling is not None:
        base = inverse_frequencies(config.head_dim, config.rope_theta, None)
        factors = base / inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = hf_name.rsplit(".", 1)
        parts = stem.split(".", 3)
        target = f"blk.{parts[2]}.{NAMES[parts[3]]}" if stem.startswith("model.layers.") else NAMES[stem]
        values = tensor.numpy()
        if config.model_type == "llama" and target.endswith(("attn_q", "attn_k")):
            values = permuted(values, config.num_heads if target.endswith("q") else config.num_kv_heads)
        if quantize and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(f"{target}.{kind}", gguf.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases-llama3", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", name), dtype="float32")
    assert loaded.files.kind == "gguf"
    tokens = prompt(20)
    logits = chunked_logits(loaded.model, tokens, 20)
    torch.testing.assert_close(logits, hf_logits(name, tokens), atol=4e-5, rtol=0)


def test_the_configuration_comes_from_the_metadata(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "tiny.gguf", "qwen3"))
    expected = ModelConfig.from_hf(hf_model("qwen3").config.to_dict())
    assert source.config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)  # float32 in the file
    assert replace(source.config, rms_norm_eps=expected.rms_norm_eps) == expected
    assert source.end_token_ids() == [2]


def test_quantised_tensors_are_dequantised_block_by_block(tmp_path: Path) -> None:
    """qwen3's output projection has 192 columns: 6 blocks of 32, each with its own (half-precision) scale."""
    source = GgufSource(write_gguf(tmp_path / "tiny.gguf", "qwen3", quantize=True))
    name = "model.layers.1.self_attn.o_proj.weight"
    exact, found = hf_model("qwen3").state_dict()[name], source.get(name)
    step = exact.view(48, 6, 32).abs().amax(-1, keepdim=True) / 127
    assert ((found - exact).view(48, 6, 32).abs() <= 0.6 * step).all()
    assert source.shapes()[name] == (48, 192)


def test_a_folder_with_one_gguf_file_will_do_and_two_will_not(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    assert load_model(tmp_path, dtype="float32").files.path == path
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelNotFound, match=r"2 GGUF files \(other\.gguf, tiny\.gguf\): name one"):
        load_model(tmp_path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", architecture="rwkv7")
    with pytest.raises(UnsupportedModel, match=r"'rwkv7' in tiny\.gguf\. Supported: llama, qwen2, qwen3"):
        load_model(path)


@pytest.mark.parametrize("kept", [0, 4, 100, 3000])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"tiny\.gguf is not a whole GGUF file"):
        load_model(path)


def test_tensors_of_another_shape_than_the_metadata_says_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((199, 48), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((48, 48), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"q_proj\.weight has shape \[48, 48\], expected \[192, 48\]"):
        load_model(path)
