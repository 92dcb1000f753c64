"""Two ranks over gloo that swap: each copies its own heads of the blocks, and the output is that of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rules import PreemptAtRandom
from server_apps import save_tiny

from pagedserve.engine.engine import Engine
from pagedserve.engine.llm import LLM
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import Policy

PROMPTS = ["Once upon a time", "The moon is " * 5, "x", "The moon is made of", "abc" * 9]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_blocks": 24,
    "max_num_batched_tokens": 64,
    "progress": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("parallel") / "tiny")


@pytest.fixture(scope="module")
def sharded(model: Path) -> Iterator[LLM]:
    llm = LLM(
        model, tensor_parallel_size=2, policy=Policy(preemption_mode="swap"), num_cpu_blocks=16, **OPTIONS
    )
    yield llm
    llm.close()


def test_two_ranks_that_swap_give_the_output_of_one(model: Path, sharded: LLM) -> None:
    alone = LLM(model, **OPTIONS)
    expected = [group[0].token_ids for group in alone.generate(PROMPTS, PARAMS)]
    alone.close()
    assert any("16 KV blocks in host memory" in line for line in sharded.decisions)
    own, swapped = sharded.engine, 0
    for depth, caches in ((0, False), (1, False), (1, True)):
        rule = PreemptAtRandom(4 + depth, 0.1)
        spec = Policy(batching=rule, preemption_mode="swap", enable_prefix_caching=caches)
        engine = Engine(
            own.runner.model, own.vocabulary, spec, own.limits, overlap_depth=depth, kv=own.runner.kv
        )
        states = [engine.submit(prompt, PARAMS)[0] for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
        swapped += sum(engine.record().array("steps", "num_blocks_swapped_in").tolist())
        engine.close()
        assert [state.completion().token_ids for state in states] == expected
    assert swapped > 10
