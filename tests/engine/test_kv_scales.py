"""Scales of an eight-bit KV cache: read, measured, and what they save; under Triton's interpreter without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import NUM_TOKENS, engine_of, greedy, hf_config, ids_of, prompts, run_all, small_limits
from model_checkpoints import DictSource
from safetensors.torch import load_file, save_file
from server_apps import save_tiny

from pagedserve.engine.graphs import DecodeGraphs
from pagedserve.engine.kv_calibration import calibrate, calibration_prompts
from pagedserve.engine.llm import LLM
from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import WeightsError
from pagedserve.engine.model.kv_scales import KVScales, calculate_scales, read_scales
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import check_tensors, random_weights
from pagedserve.kernels.launching import is_interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cpu" if is_interpreted() else "cuda"
LARGE, SMALL = 3000.0, 2.0**-12
PROMPT = tuple(prompts(1, 3)[0]) * 2


def config_of(kind: str = "llama") -> ModelConfig:
    return ModelConfig.from_hf(hf_config(kind).to_dict())


def planted(keys: float, values: float, extra: dict[str, torch.Tensor] | None = None) -> DictSource:
    """Random weights, but keys and values so many times as large; queries and outputs undo it."""
    tensors = dict(random_weights(config_of(), 7).items())
    for layer in range(config_of().num_layers):
        attn = f"model.layers.{layer}.self_attn."
        tensors[attn + "k_proj.weight"] = tensors[attn + "k_proj.weight"] * keys
        tensors[attn + "q_proj.weight"] = tensors[attn + "q_proj.weight"] / keys
        tensors[attn + "v_proj.weight"] = tensors[attn + "v_proj.weight"] * values
        tensors[attn + "o_proj.weight"] = tensors[attn + "o_proj.weight"] / values
    return DictSource({**tensors, **(extra or {})})


def model_of(source: DictSource, kv_cache_dtype: str = "fp8") -> Model:
    return Model(
        config_of(),
        source,
        dtype=torch.float32,
        device=DEVICE,
        attention="triton",
        kv_cache_dtype=kv_cache_dtype,
    )


def logprobs_of(model: Model) -> torch.Tensor:
    """Of all tokens at every position of a prompt, computed in two chunks and two decodes."""
    kv, found, count = model.make_cache(-(-len(PROMPT) // 4), 4), [], len(PROMPT)
    for start, end in ((0, 11), (11, count - 2), (count - 2, count - 1), (count - 1, count)):
        batch = make_batch([SequenceChunk(PROMPT[start:end], start, range(kv.num_blocks))], 4, DEVICE)
        found.append(model.logits(model.forward(batch, kv)))
    return torch.cat(found).log_softmax(-1)


def error_of(model: Model, exact: torch.Tensor) -> float:
    return float((logprobs_of(model) - exact).abs().max())


@pytest.mark.parametrize(("keys", "values"), [(LARGE, LARGE), (SMALL, SMALL), (LARGE, SMALL)])
def test_measured_scales_keep_what_saturates_or_vanishes(keys: float, values: float) -> None:
    """Without them 448 is the largest key, and 2^-10 rounds to zero; with them the error is that of ordinary keys."""
    source = planted(keys, values)
    exact = logprobs_of(model_of(source, "auto"))
    ordinary = error_of(model_of(planted(1.0, 1.0)), logprobs_of(model_of(planted(1.0, 1.0), "auto")))
    model = model_of(source)
    without = error_of(model, exact)
    calculate_scales(model, calibration_prompts(ids_of, NUM_TOKENS, 96))
    assert error_of(model, exact) < min(1.5 * ordinary, without / 5), (without, ordinary)


def test_a_measured_scale_is_the_largest_key_over_the_constant() -> None:
    """Twice the keys, twice the scale; what is stored lies within the range, with room above."""
    first, second = model_of(planted(1.0, 1.0)), model_of(planted(2.0, 4.0))
    told = [PROMPT, tuple(range(70))]
    for model in (first, second):
        calculate_scales(model, told)
    for (key, value), (twice, fourfold) in zip(
        first.kv_scales.by_layer, second.kv_scales.by_layer, strict=True
    ):
        assert twice == pytest.approx(2 * key, rel=1e-5)
        assert fourfold == pytest.approx(4 * value, rel=1e-5)
    kv = first.make_cache(len(PROMPT), 1)
    first.forward(make_batch([SequenceChunk(PROMPT, 0, range(len(PROMPT)))], 1, DEVICE), kv)
    stored = kv.data.view(torch.float8_e4m3fn).float().abs().amax(dim=(1, 3, 4, 5))
    assert (stored[:, 0] <= 200).all()
    assert (stored[:, 1] <= 100).all()
    assert (stored[:, 0] > 100).all(), "most of the prompts measured is this one"


def test_a_layer_without_values_has_scale_one() -> None:
    source = planted(1.0, 1.0)
    source.tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    model = model_of(source)
    calculate_scales(model, [PROMPT])
    assert model.kv_scales.by_layer[1][1] == 1.0
    assert model.kv_scales.by_layer[0][1] != 1.0


def test_keys_that_are_not_finite_have_no_scale() -> None:
    source = planted(1.0, 1.0)
    source.tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("inf")
    with pytest.raises(ValueError, match="layer 1 has keys or values that are not finite"):
        calculate_scales(model_of(source), [PROMPT])


STYLES = {
    "llm-compressor": ("k_scale", "v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
}


def scales_named(names: Sequence[str], pairs: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.as_tensor(number)
        for layer, pair in enumerate(pairs)
        for name, number in zip(names, pair, strict=True)
    }


@pytest.mark.parametrize("style", STYLES)
def test_the_checkpoints_scales_are_read_and_used(style: str) -> None:
    """In each of the forms; scalars or one number in a row."""
    extra = scales_named(STYLES[style], [(16.0, [32.0]), ([64.0], 16.0)])
    source = planted(LARGE, LARGE, extra)
    check_tensors(config_of(), source)
    model = model_of(source)
    assert model.kv_scales.by_layer == ((16.0, 32.0), (64.0, 16.0))
    assert str(model.kv_scales) == "from the checkpoint"
    exact = logprobs_of(model_of(source, "auto"))
    assert error_of(model, exact) < error_of(model_of(planted(LARGE, LARGE)), exact) / 5


def test_one_scale_for_both_is_the_oldest_form() -> None:
    source = DictSource(scales_named(["kv_scale"], [(0.5,), (0.25,)]))
    assert read_scales(source, 2).by_layer == ((0.5, 0.5), (0.25, 0.25))


def test_what_the_checkpoint_lacks_is_one_or_measured() -> None:
    source = planted(1.0, 1.0, scales_named(["k_scale"], [(16.0,)]))
    model = model_of(source)
    assert model.kv_scales.by_layer == ((16.0, 1.0), (1.0, 1.0))
    assert str(model.kv_scales) == "1 of 4 from the checkpoint, the others 1"
    calibrate(model, ids_of, NUM_TOKENS, 96)
    scales = model.kv_scales.by_layer
    assert scales[0][0] == 16.0
    assert 1.0 not in (scales[0][1], *scales[1])
    assert str(model.kv_scales) == "1 of 4 from the checkpoint, the others measured on made-up prompts"


@pytest.mark.parametrize(
    ("names", "numbers", "words"),
    [
        (["k_scale"], (0.0,), r"layers\.0\.self_attn\.k_scale is 0\.0; a scale is a positive number"),
        (["attn.v_scale"], (float("nan"),), "attn.v_scale is nan"),
        (["v_scale"], ([1.0, 2.0],), r"v_scale has shape \[2\]; one number a layer is supported"),
        (
            ["k_scale", "k_proj.k_scale"],
            (1.0, 2.0),
            "there more than once: .*k_scale 1.0, .*k_proj.k_scale 2.0",
        ),
    ],
)
def test_scales_that_cannot_be_are_refused(names: list[str], numbers: Any, words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        model_of(planted(1.0, 1.0, scales_named(names, [numbers])))


def test_a_scale_of_a_layer_that_is_not_there_is_unexpected() -> None:
    source = planted(1.0, 1.0, {"model.layers.2.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(WeightsError, match=r"unexpected model\.layers\.2\.self_attn\.k_scale"):
        check_tensors(config_of(), source)


def made_by(model: Model, *, has_graphs: bool = False) -> list[tuple[int, ...]]:
    limits, texts = small_limits(), prompts(4, 5, longest=12)
    with engine_of("mixed", limits, model=model) as engine:
        if has_graphs:
            runner = engine.runner
            graphs = DecodeGraphs(model, runner.kv, (1, 2, 4, 8), limits.max_model_len, lambda run: run)
            assert len(list(graphs.record())) == 4
            runner.graphs = graphs
        return [tuple(completion.token_ids) for completion in run_all(engine, texts, greedy(6))]


def test_an_engine_and_its_graphs_use_them() -> None:
    """Recorded decode steps have the scales of their cache in them."""
    exact, model = made_by(model_of(planted(LARGE, LARGE), "auto")), model_of(planted(LARGE, LARGE))

    def num_equal(made: list[tuple[int, ...]]) -> int:
        return sum(
            a == b for one, other in zip(made, exact, strict=True) for a, b in zip(one, other, strict=True)
        )

    without = num_equal(made_by(model))
    calibrate(model, ids_of, NUM_TOKENS, 96)
    scaled = made_by(model)
    assert without < 12 < 20 <= num_equal(scaled) <= 24
    assert made_by(model, has_graphs=True) == scaled


def test_prompts_are_the_same_every_time_and_fit() -> None:
    made = calibration_prompts(ids_of, NUM_TOKENS, 4096)
    assert made == calibration_prompts(ids_of, NUM_TOKENS, 4096)
    assert [len(prompt) for prompt in made] == [512, 512]
    assert len(set(made[1])) == NUM_TOKENS
    assert [len(prompt) for prompt in calibration_prompts(ids_of, NUM_TOKENS, 7)] == [7, 7]
    assert len(calibration_prompts(lambda text: [NUM_TOKENS], NUM_TOKENS, 7)) == 1, (
        "a text of padded rows alone"
    )


class TwoRanks:
    """Another rank, whose keys and values are ``factor`` times as large."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __getattr__(self, name: str) -> Any:
        from pagedserve.engine.parallel.communicator import ALONE

        return getattr(ALONE, name)

    def all(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, own * self.factor])


def test_the_largest_of_all_ranks_counts() -> None:
    one, two = model_of(planted(1.0, 1.0)), model_of(planted(1.0, 1.0))
    two.communicator = TwoRanks(8.0)  # pyright: ignore[reportAttributeAccessIssue]
    for model in (one, two):
        calculate_scales(model, [PROMPT])
    for mine, theirs in zip(one.kv_scales.by_layer, two.kv_scales.by_layer, strict=True):
        assert theirs == pytest.approx([8 * scale for scale in mine])


def tiny_folder(folder: Path, extra: dict[str, torch.Tensor]) -> Path:
    made = save_tiny(folder)
    path = made / "model.safetensors"
    save_file({**load_file(path), **extra}, path)
    return made


OPTIONS: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "num_blocks": 24, "progress": False}
IN_FP8: dict[str, Any] = {"attention": "triton", "kv_cache_dtype": "fp8"}


def test_an_llm_measures_and_says_so(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    plain, scaled = (LLM(folder, **OPTIONS, **IN_FP8, calculate_kv_scales=on) for on in (False, True))
    assert any("in fp8, scales 1, " in line for line in plain.decisions), plain.decisions
    assert any("in fp8, scales measured on made-up prompts, " in line for line in scaled.decisions)
    assert plain.engine.runner.kv.scales == ((1.0, 1.0),) * plain.model.config.num_layers
    assert scaled.engine.runner.kv.scales == scaled.model.kv_scales.by_layer
    assert 1.0 not in [scale for layer in scaled.engine.runner.kv.scales for scale in layer]
    assert json.dumps(scaled.engine.runner.kv.scales), "plain numbers"


def test_the_option_is_refused_where_it_has_nothing_to_do(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    with pytest.raises(ValueError, match="calculate_kv_scales is true beside kv_cache_dtype auto"):
        LLM(folder, **OPTIONS, calculate_kv_scales=True)
    num_layers = LLM(folder, **OPTIONS).model.config.num_layers
    full = tiny_folder(tmp_path / "full", scales_named(["k_scale", "v_scale"], [(0.5, 0.5)] * num_layers))
    with pytest.raises(ValueError, match="the checkpoint has all scales of the KV cache: leave it out"):
        LLM(full, **OPTIONS, **IN_FP8, calculate_kv_scales=True)
    assert any(
        "in fp8, scales from the checkpoint" in line for line in LLM(full, **OPTIONS, **IN_FP8).decisions
    )
    assert LLM(full, **OPTIONS).engine.runner.kv.scales[0] == (1.0, 1.0), "not of bytes: nothing is divided"


def test_words_of_where_scales_come_from() -> None:
    assert str(KVScales(((None, None),))) == "1"
    assert str(KVScales(((None, None),), ((2.0, 3.0),))) == "measured on made-up prompts"
    assert str(KVScales(((0.5, 0.5),))) == "from the checkpoint"
