"""Tensor parallelism by arithmetic: parts that add up to the whole, in threads that stand for ranks."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_models import KINDS, hf_config
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import expected_shapes, random_weights
from pagedserve.engine.parallel.shards import CannotShard, Shard, ShardedSource, shard_config


class ThreadGroup:
    """What threads that stand for ranks have in common."""

    def __init__(self, size: int) -> None:
        self.barrier, self.held = threading.Barrier(size, timeout=30), [torch.empty(0)] * size

    def exchange(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, in the order of ranks."""
        self.held[rank] = own.clone()
        self.barrier.wait()
        found = list(self.held)
        self.barrier.wait()
        return found


class ThreadCommunicator:
    def __init__(self, shard: Shard, group: ThreadGroup) -> None:
        self.shard, self.group = shard, group

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.shard.rank * len(table)
        is_here = (local >= 0) & (local < len(table))
        return self.sum(table[local.clamp(0, len(table) - 1)] * is_here.unsqueeze(-1))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.exchange(self.shard.rank, partial)).sum(0)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.exchange(self.shard.rank, logits), dim=-1)

    def share(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.group.exchange(self.shard.rank, token_ids)[0]

    def all(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.exchange(self.shard.rank, own))


def config_of(kind: str, **changes: Any) -> ModelConfig:
    return replace(ModelConfig.from_hf(hf_config(kind).to_dict()), **changes)


def logits_of(model: Model) -> torch.Tensor:
    """Of a prompt in two chunks, and then a decode."""
    kv = model.make_cache(8, 4)
    tokens = [5, 250, 17, 17, 99, 3, 200, 128, 64, 1]
    steps = []
    for start, end in ((0, 6), (6, 9), (9, 10)):
        batch = make_batch([SequenceChunk(tokens[start:end], start, [3, 0, 5])], 4)
        steps.append(model.logits(model.forward(batch, kv)))
    return torch.cat(steps)


CASES = [(kind, {}) for kind in KINDS]
CASES += [("llama", {"tie_word_embeddings": True}), ("llama", {"vocab_size": 257})]
CASES += [("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True})]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_two_parts_give_the_logits_of_the_whole(kind: str, changes: dict[str, Any]) -> None:
    """Every family member, biases, tied embeddings, and a vocabulary that does not divide."""
    config = config_of(kind, **changes)
    source = random_weights(config, 3)
    whole = logits_of(Model(config, source, dtype=torch.float32))
    group, found = ThreadGroup(2), [torch.empty(0)] * 2

    def run(rank: int) -> None:
        shard = Shard(rank, 2)
        communicator = ThreadCommunicator(shard, group)
        model = Model(config, source, dtype=torch.float32, shard=shard, communicator=communicator)
        assert model.config == config
        assert model.make_cache(2, 4).num_kv_heads == config.num_kv_heads // 2
        found[rank] = logits_of(model)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in found:
        torch.testing.assert_close(logits[:, : config.vocab_size], whole, atol=2e-5, rtol=0)


@given(st.integers(1, 9), st.integers(1, 300))
def test_parts_cover_everything_once(size: int, whole: int) -> None:
    things = list(range(whole))
    parts = [things[Shard(rank, size).part(whole)] for rank in range(size)]
    assert [thing for part in parts for thing in part] == things
    assert max(map(len, parts)) == -(-whole // size)


def test_every_tensor_is_cut_or_kept_and_nothing_else() -> None:
    """Rows or columns of the ranks together are the whole tensor; biases behind a sum are there once."""
    config = config_of("llama", vocab_size=257, qkv_bias=True, output_bias=True, mlp_bias=True)
    source = random_weights(config, 4)
    parts = [ShardedSource(source, config, Shard(rank, 2)) for rank in range(2)]
    for name, shape in expected_shapes(config).items():
        whole, (first, second) = source.get(name), (part.get(name) for part in parts)
        assert tuple(whole.shape) == shape
        assert first.shape == second.shape == parts[0].shapes()[name]
        if first.shape == whole.shape and "bias" not in name:
            assert "norm" in name
            assert torch.equal(first, whole)
            assert torch.equal(second, whole)
        elif first.shape == whole.shape:
            assert torch.equal(first + second, whole)
        else:
            dim = 0 if first.shape[0] < whole.shape[0] else 1
            together = torch.cat([first, second], dim)
            assert torch.equal(together.narrow(dim, 0, whole.shape[dim]), whole)
            assert not together.narrow(dim, whole.shape[dim], together.shape[dim] - whole.shape[dim]).any()


@pytest.mark.parametrize(("name", "size"), [("num_kv_heads", 4), ("num_heads", 3), ("intermediate_size", 64)])
def test_what_does_not_divide_is_refused_by_name(name: str, size: int) -> None:
    config = config_of("llama", num_heads=4, num_kv_heads=2, intermediate_size=48)
    if name == "intermediate_size":
        config = replace(config, num_heads=64, num_kv_heads=64)
    with pytest.raises(CannotShard, match=f"tensor_parallel_size is {size}; the model's {name}"):
        shard_config(config, Shard(0, size))
