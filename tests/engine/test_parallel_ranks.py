"""Two ranks in two processes over gloo: the output of one rank, whatever the schedule; and how they end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine_rules import PreemptAtRandom
from server_apps import save_tiny

from pagedserve.engine.engine import Engine, EngineDead
from pagedserve.engine.llm import LLM
from pagedserve.engine.outputs import Completion
from pagedserve.engine.parallel.processes import ProcessRanks
from pagedserve.engine.parallel.shards import CannotShard
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import Policy, policy

PROMPTS = ["Once upon a time", "The moon is " * 5, "x", "The moon is made of", "abc" * 9]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop="\x00never"),
    SamplingParams(temperature=0.8, seed=9, n=2, max_tokens=10, ignore_eos=True),
]
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
    llm = LLM(model, tensor_parallel_size=2, **OPTIONS)
    yield llm
    llm.close()
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    llm = LLM(model, **OPTIONS)
    groups = llm.generate(PROMPTS, PARAMS)
    llm.close()
    return [completion for group in groups for completion in group]


def schedules() -> Iterator[tuple[str, Policy, int]]:
    yield "serial", policy("serial"), 0
    yield "mixed", policy("mixed"), 0
    yield "vllm_v1, overlapped", policy("vllm_v1"), 1
    yield "preempted", Policy(batching=PreemptAtRandom(1, 0.1)), 0
    yield (
        "preempted, overlapped, cached",
        Policy(batching=PreemptAtRandom(2, 0.1), enable_prefix_caching=True),
        1,
    )


@pytest.mark.parametrize(("spec", "depth"), [pytest.param(s, d, id=name) for name, s, d in schedules()])
def test_two_ranks_give_the_output_of_one(
    sharded: LLM, expected: list[Any], spec: Policy, depth: int
) -> None:
    """One engine after the other on the same ranks, each with a policy of its own."""
    own = sharded.engine
    engine = Engine(own.runner.model, own.vocabulary, spec, own.limits, overlap_depth=depth)
    states = [
        state
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        for state in engine.submit(prompt, params)
    ]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    engine.close()
    for state, other in zip(states, expected, strict=True):
        made = state.completion()
        assert made.token_ids == other.token_ids
        assert (made.text, made.finish_reason) == (other.text, other.finish_reason)
        if other.prompt_logprobs is not None:
            assert _chosen(made) == pytest.approx(_chosen(other), abs=1e-4)


def _chosen(completion: Completion) -> list[float]:
    told = completion.prompt_logprobs
    assert told is not None
    return [entry.chosen.logprob for entry in told if entry is not None]


def test_what_it_is_made_of_is_told(sharded: LLM) -> None:
    assert "attention cpu on cpu, over 2 ranks" in sharded.decisions
    local = sharded.model.local
    assert (local.num_kv_heads, sharded.model.config.num_kv_heads) == (1, 2)
    with pytest.raises(CannotShard, match="belongs to a process group already"):
        LLM("anything", tensor_parallel_size=2)


def test_ctrl_c_in_a_terminal_is_for_rank_0_alone(sharded: LLM) -> None:
    """The others are in sessions of their own: rank 0 lets its requests finish, and needs them for that."""
    ranks = sharded.model.ranks
    assert isinstance(ranks, ProcessRanks)
    own = os.getsid(0)
    assert all(os.getsid(worker.pid) == worker.pid != own for worker in ranks._workers)


def test_a_rank_that_dies_ends_the_engine(model: Path, sharded: LLM) -> None:
    """The last test here: the ranks of the others go with it."""
    ranks = sharded.model.ranks
    assert isinstance(ranks, ProcessRanks)
    sharded.engine.submit("x", PARAMS[0])
    sharded.engine.step()
    ranks._workers[0].kill()
    ranks._workers[0].wait()
    with pytest.raises(RuntimeError):  # of gloo, or `RankEnded`, whichever comes first
        sharded.finish_all()
    with pytest.raises(EngineDead, match="the engine has stopped"):
        sharded.engine.submit("y", PARAMS[0])


def test_a_model_that_does_not_divide_is_refused(model: Path, sharded: LLM) -> None:
    sharded.close()
    with pytest.raises(
        CannotShard, match="tensor_parallel_size is 3; the model's num_heads, 4, does not divide"
    ):
        LLM(model, tensor_parallel_size=3, **OPTIONS)
    assert not dist.is_initialized()
