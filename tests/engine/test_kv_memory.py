"""How many KV blocks there are: plain sums, and the whole plan on a stand-in for a GPU's memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import small_limits, tiny_model
from server_apps import save_tiny

from pagedserve.engine import graph_memory, kv_memory
from pagedserve.engine.graph_memory import expected_bytes, graph_bytes
from pagedserve.engine.graphs import DecodeGraphs, graph_sizes
from pagedserve.engine.kv_memory import (
    GIB,
    DeviceMemory,
    fit_blocks,
    measure_device,
    measure_ranks,
    plan_num_blocks,
)
from pagedserve.engine.largest_step import largest_step
from pagedserve.engine.llm import LLM
from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.model import Model
from pagedserve.engine.parallel.communicator import Alone
from pagedserve.engine.parallel.ranks import Largest, Message
from pagedserve.engine.prompt_logprobs import GROUP_ROWS
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits

MIB = 1 << 20
H200 = DeviceMemory(total=140 * GIB, in_use=16 * GIB, step=2 * GIB, graphs=GIB // 2)
WORDS = "0.9 of 140.00 GiB, less 16.00 in use, 2.00 for a step and 0.50 for graphs, leaves 107.50"


def test_blocks_are_what_is_left_of_the_share() -> None:
    """0.9 of 140 GiB less 18.5 GiB are 107.5; one block more is kept that is always zero."""
    assert fit_blocks([H200], 0.9, GIB // 8, needed=1) == (107 * 8 + 4 - 1, WORDS)
    assert fit_blocks([H200], 0.5, 2 << 20, needed=1)[0] == 51 * 512 + 256 - 1
    assert H200.left(0.1) == 14 * GIB - 37 * GIB // 2


def test_the_rank_with_the_least_room_decides() -> None:
    """By what is left, whatever takes it; the first of equals."""
    full = replace(H200, in_use=20 * GIB)
    small = replace(H200, total=138 * GIB)
    ranks = [small, full, H200, full]
    blocks, words = fit_blocks(ranks, 0.9, GIB // 8, needed=1)
    assert blocks == fit_blocks([full], 0.9, GIB // 8, needed=1)[0]
    assert words.startswith("rank 1 has the least room: 0.9 of 140.00 GiB, less 20.00 in use,")


@pytest.mark.parametrize(("share", "needed", "left"), [(0.9, 900, 859), (0.133, 1, 0), (0.01, 1, 0)])
def test_too_little_for_one_sequence_is_refused_with_the_numbers(
    share: float, needed: int, left: int
) -> None:
    words = (
        rf"{share:g} of 140\.00 GiB, less 16\.00 in use, 2\.00 for a step and 0\.50 for graphs, leaves .*: "
    )
    with pytest.raises(
        ValueError, match=f"{words}room for {left} KV blocks; .* takes {needed}: lower max_model_len"
    ):
        fit_blocks([H200], share, GIB // 8, needed)


@pytest.mark.parametrize(
    ("growths", "count", "expected"),
    [
        ([100, 2, 3, 2], 4, 107),
        ([100, 2, 3, 2], 10, 107 + 6 * 3),
        ([100], 1, 100),
        ([5, -4, 0], 9, 5),
        ([], 0, 0),
    ],
)
def test_graphs_that_were_not_recorded_take_what_the_others_add(
    growths: list[int], count: int, expected: int
) -> None:
    assert expected_bytes(growths, count) == expected


class ScriptedDevice:
    """A device of 100 GiB on which tensors are counted by what is run: a step, and recorded decode steps."""

    def __init__(self, taken: int = 30 * GIB) -> None:
        self.taken, self.peak, self.settled = taken, 0, 0
        self.live: list[weakref.ref[object]] = []

    def settle(self) -> None:
        gc.collect()
        self.settled, self.peak = self.settled + 1, self.allocated_bytes()

    def total_bytes(self) -> int:
        return 100 * GIB

    def free_bytes(self) -> int:
        held = sum(each is not None for each in (ref() for ref in self.live))
        return self.total_bytes() - self.taken - held * 10 * MIB

    def allocated_bytes(self) -> int:
        return self.taken - GIB  # the driver's own

    def peak_bytes(self) -> int:
        return self.peak

    def run_step(self) -> None:
        """Two GiB of activations, and half a GiB that stays, of which the driver has half."""
        self.taken += GIB // 2
        self.peak = max(self.peak, self.allocated_bytes() + 2 * GIB)

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Ten MiB for every graph that lives."""
        run()

        def replay() -> torch.Tensor:
            return run()

        self.live.append(weakref.ref(replay))
        return replay


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ScriptedDevice:
    """The CPU taken for a GPU of which the whole path of the plan is driven."""
    made, step = ScriptedDevice(), kv_memory.largest_step

    def run(model: Model, limits: Limits) -> None:
        step(model, limits)
        made.run_step()

    def graphs(model: Model, kv: KVCache, max_num_seqs: int, max_model_len: int) -> DecodeGraphs:
        return DecodeGraphs(model, kv, graph_sizes(max_num_seqs), max_model_len, made.capture)

    monkeypatch.setattr(kv_memory, "largest_step", run)
    monkeypatch.setattr(kv_memory, "meter_of", lambda device: made)
    monkeypatch.setattr(graph_memory, "make_graphs", graphs)
    return made


def test_what_a_device_is_measured_to_hold(device: ScriptedDevice) -> None:
    """In use is what stays behind a step; its peak counts from there; graphs of 1, 2, 4 and 8 sequences."""
    found = measure_device(tiny_model("llama", "triton"), small_limits(), device, has_graphs=True)
    assert found == DeviceMemory(100 * GIB, 30 * GIB + GIB // 2, 2 * GIB, 4 * 10 * MIB)
    gc.collect()
    assert not [ref for ref in device.live if ref() is not None], "they were thrown away, with their cache"


def test_more_graphs_than_are_recorded_are_counted(device: ScriptedDevice) -> None:
    limits = small_limits(max_num_seqs=40, max_num_batched_tokens=64)
    assert graph_bytes(tiny_model("llama", "triton"), limits, device) == len(graph_sizes(40)) * 10 * MIB
    assert len(device.live) == graph_memory.NUM_RECORDED < len(graph_sizes(40))


def test_without_graphs_nothing_is_kept_for_them(device: ScriptedDevice) -> None:
    found = measure_device(tiny_model("llama", "triton"), small_limits(), device, has_graphs=False)
    assert (found.graphs, device.live) == (0, [])


class TwoRanks(Alone):
    """Another rank, which has three GiB more in use."""

    def all(self, own: torch.Tensor) -> torch.Tensor:
        assert own.dtype == torch.int64
        return torch.stack([own, own + torch.tensor([0, 3 * GIB, 0, 0, 0])])


class Heard:
    """The other ranks, as rank 0 sees them."""

    size = 2

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def close(self) -> None:
        pass


def test_every_rank_is_told_to_measure_and_heard(
    device: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, limits, ranks = tiny_model("llama", "triton"), small_limits(), Heard()
    monkeypatch.setattr(model, "ranks", ranks)
    monkeypatch.setattr(model, "communicator", TwoRanks())
    first, second = measure_ranks(model, limits, device, has_graphs=False)
    assert second.in_use - first.in_use == 3 * GIB
    device.taken = 30 * GIB
    blocks, words = plan_num_blocks(model, limits, None, 0.5, has_graphs=False)
    assert ranks.messages == [Largest(limits)]
    block_bytes = kv_memory.block_bytes_of(model, limits.block_size)
    assert blocks == (50 * GIB - 33 * GIB - GIB // 2 - 2 * GIB) // block_bytes - 1
    assert words == (
        "rank 1 has the least room: 0.5 of 100.00 GiB, less 33.50 in use, 2.00 for a step and 0.00 for graphs, "
        "leaves 14.50"
    )


def test_an_llm_takes_the_plan_and_says_its_numbers(device: ScriptedDevice, tmp_path: Path) -> None:
    """A pool small enough to be had: 33 GiB and a few KiB of the device."""
    device.taken = 30 * GIB
    share = (32.5 * GIB + 40 * MIB + 8 * MIB) / (100 * GIB)
    llm = LLM(save_tiny(tmp_path / "tiny"), gpu_memory_utilization=share, max_num_seqs=8, progress=False)
    block_bytes = kv_memory.block_bytes_of(llm.model, 16)
    assert llm.engine.limits.num_blocks == pytest.approx(8 * MIB // block_bytes - 1, abs=1)
    (line,) = (line for line in llm.decisions if "KV blocks" in line)
    assert "of 100.00 GiB, less 30.50 in use, 2.00 for a step and 0.04 for graphs, leaves 0.01" in line
    assert llm.generate("x")[0][0].token_ids
    llm.close()


def test_copies_to_the_host_have_a_buffer(device: ScriptedDevice) -> None:
    """Of the host's blocks, as far as 64 MiB hold them."""
    model, limits = tiny_model("llama", "triton"), small_limits()
    block_bytes = kv_memory.block_bytes_of(model, limits.block_size)
    found = []
    for count in (0, 100, 1 << 30):
        device.taken = 30 * GIB
        found.append(plan_num_blocks(model, limits, None, 0.5, count, has_graphs=False))
    plain, few, many = (blocks for blocks, _ in found)
    assert (plain - few, plain - many) == (100, (64 * MIB) // block_bytes)
    assert [" and 0.06 for copies to the host, leaves" in words for _, words in found] == [False, False, True]


@pytest.mark.parametrize("budget", [10, 96, 100, 250])
def test_the_largest_step_fills_the_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts of the longest length and a rest, logprobs of all their tokens, and a choice for every seat."""
    model, limits = tiny_model(), small_limits(max_num_batched_tokens=budget)
    tokens: list[int] = []
    rows: list[int] = []
    forward, logits = Model.forward, Model.logits

    def spy(self: Model, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        tokens.append(batch.num_tokens)
        return forward(self, batch, kv)

    def spy_logits(self: Model, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Model, "forward", spy)
    monkeypatch.setattr(Model, "logits", spy_logits)
    largest_step(model, limits)
    assert tokens == [budget]
    groups = [min(GROUP_ROWS, budget - start) for start in range(0, budget, GROUP_ROWS)]
    assert rows == [*groups, limits.max_num_seqs]


def test_the_share_is_for_gpus_and_against_a_number(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.5 beside device cpu"):
        LLM(folder, gpu_memory_utilization=0.5, progress=False)
    with pytest.raises(ValueError, match="beside num_blocks, which says the number"):
        LLM(folder, gpu_memory_utilization=0.5, num_blocks=8, progress=False)
