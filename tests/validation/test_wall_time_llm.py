"""A model known by its configuration: its geometry for cost models, its limits, and whether a profile is of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from validation_engines import tiny_profile
from wall_time_runs import LIMITS, greedy, vocabulary, wall_engine

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.tiny import tiny_model
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.geometry import GEOMETRIES, from_config
from pagedserve.simulator.wall_time import WallTimeState
from pagedserve.validation.profiles import check_geometry
from pagedserve.validation.wall_time_engine import WallTimeModel
from pagedserve.validation.wall_time_llm import geometry_of

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 64},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_a_configuration_has_the_geometry_that_the_simulator_reads_from_it(changes: dict[str, Any]) -> None:
    values = {**SMOLLM2, **changes}
    config = ModelConfig.from_hf(values)
    found, expected = geometry_of(config, "it"), from_config(values, "it")
    assert replace(found, source="") == replace(expected, source="")
    assert found.num_params == config.num_parameters


def test_smollm2_is_the_one_in_the_table() -> None:
    found = geometry_of(ModelConfig.from_hf(SMOLLM2), "SmolLM2-135M")
    assert replace(found, source="") == replace(GEOMETRIES["smollm2-135m"], source="")


def test_a_profile_of_another_model_or_of_an_unknown_one_is_refused() -> None:
    profile, config = tiny_profile(), tiny_model()[0].config
    check_geometry(profile, config)
    with pytest.raises(ValueError, match=r"another model \(tiny: num_heads 4 in the profile, 8 here\)"):
        check_geometry(profile, replace(config, num_heads=8))
    with pytest.raises(ValueError, match="does not say on which model"):
        check_geometry(replace(profile, provenance={}), config)


def test_a_kv_cache_and_too_many_positions_are_refused() -> None:
    model = WallTimeModel(WallTimeState(ConstantCost(1)), 256)
    kv = tiny_model()[0].make_cache(LIMITS.num_blocks, LIMITS.block_size)
    with pytest.raises(ValueError, match="keeps no keys and values"):
        model.make_runner(LIMITS, vocabulary(), overlaps=False, caches_prefixes=False, kv=kv)
    with (
        pytest.raises(ValueError, match="max_model_len is 257; the model has 256 positions"),
        wall_engine(ConstantCost(1), limits=replace(LIMITS, max_model_len=257)) as (engine, _),
    ):
        engine.submit([1], greedy(1))
