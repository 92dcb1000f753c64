"""A rank that follows rank 0's messages: the same cache and the same last tokens, and no token told by the host."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import pytest
import torch
from engine_models import drain, greedy, hf_config, hf_greedy, prompts, small_limits, vocabulary
from engine_rules import PreemptAtRandom

from pagedserve.engine.engine import Engine
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import random_weights
from pagedserve.engine.parallel.communicator import Alone
from pagedserve.engine.parallel.ranks import Begin, Message, Resumed, Step, resumed_of
from pagedserve.engine.parallel.worker import Worker
from pagedserve.engine.sequences import MirrorState
from pagedserve.policy import Policy, Request, policy


class Told:
    """`Ranks` of which the other one is told everything afterwards, as over a pipe."""

    size = 2

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send(self, message: Message) -> None:
        self.messages.append(pickle.dumps(message))

    def close(self) -> None:
        """Nobody is there."""

    def steps(self) -> list[Step]:
        found = [pickle.loads(message) for message in self.messages]
        assert isinstance(found[0], Begin)
        assert all(isinstance(message, Step) for message in found[1:]), "plans, and nothing else"
        return found[1:]


class Speaks(Alone):
    """Rank 0: keeps what it shares."""

    def __init__(self, shared: deque[torch.Tensor]) -> None:
        self.shared = shared

    def share(self, token_ids: torch.Tensor) -> torch.Tensor:
        self.shared.append(token_ids.clone())
        return token_ids


class Hears(Speaks):
    """The other rank: finds the same there, in the same order."""

    def share(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids.copy_(self.shared.popleft())


def whole_model(communicator: Any, ranks: Told | None = None) -> Model:
    """Each of the two has all of the model, so that either can be compared with one."""
    config = ModelConfig.from_hf(hf_config("llama").to_dict())
    model = Model(config, random_weights(config, 7), dtype=torch.float32, communicator=communicator)
    if ranks is not None:
        model.ranks = ranks
    return model


@pytest.mark.parametrize(
    ("spec", "depth"),
    [
        pytest.param(policy("mixed"), 0, id="mixed"),
        pytest.param(policy("vllm_v1"), 1, id="overlapped"),
        pytest.param(Policy(batching=PreemptAtRandom(3, 0.1)), 1, id="preempted, overlapped"),
    ],
)
def test_a_rank_that_follows_has_the_same_cache_and_last_tokens(spec: Policy, depth: int) -> None:
    told, shared, texts = Told(), deque[torch.Tensor](), prompts(7, 65)
    engine = Engine(
        whole_model(Speaks(shared), told),
        vocabulary(),
        spec,
        small_limits(num_blocks=40),
        overlap_depth=depth,
    )
    states = [engine.submit(text, greedy(12))[0] for text in texts]
    drain(engine)
    engine.close()
    assert [tuple(state.token_ids) for state in states] == [hf_greedy("llama", text, 12) for text in texts]
    resumed = [row for step in told.steps() for row in step.resumed]
    assert 0 < len(resumed) <= engine.scheduler.num_preemptions
    worker = Worker(whole_model(Hears(shared)))
    for message in told.messages:
        worker.take(pickle.loads(message))
    follower = worker._engine
    assert follower is not None
    assert not shared
    assert torch.equal(follower.kv.data, engine.runner.kv.data)
    assert torch.equal(follower.table.last_tokens, engine.runner.table.last_tokens)


def test_only_those_with_output_bring_it() -> None:
    seated = [
        MirrorState(Request(number, 0, 2, 9), ids)
        for number, ids in enumerate([[1, 2], [1, 2, 3], [4, 5, 6, 7]])
    ]
    assert resumed_of(seated) == (Resumed(1, (3,)), Resumed(2, (6, 7)))
