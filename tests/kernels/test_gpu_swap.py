"""KV blocks between a CUDA device and host memory; see ``test_gpu.py``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kernel_device import DEVICE, nothing_waits

from pagedserve.engine.engine import Engine
from pagedserve.engine.graphs import DecodeGraphs, cuda_capture
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import random_weights
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.swap_bench import SwapBench
from pagedserve.engine.tiny import tiny_model
from pagedserve.kernels import host_cache
from pagedserve.kernels.host_cache import HostCache, block_shape
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits, policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
IS_CUDA = DEVICE.type == "cuda"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("staged", [2, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_wait_for_nothing_and_lose_nothing(
    dtype: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out, overwritten on the device and read there meanwhile, and back elsewhere, all put in line at once."""
    kv = KVCache(3, 40, 16, 2, 64, dtype, DEVICE)
    block_bytes = torch.Size(block_shape(kv)).numel() * dtype.itemsize
    monkeypatch.setattr(host_cache, "STAGE_BYTES", staged * block_bytes)
    numbers = torch.randint(0, 250, kv.data[:, :40].shape, generator=torch.Generator().manual_seed(2))
    kv.data[:, :40] = numbers.to(dtype).to(DEVICE)
    host, before = HostCache(kv, 12), kv.data.clone()
    assert host.data.is_pinned() == IS_CUDA
    draw = random.Random(3)
    out, places, back = draw.sample(range(40), 9), draw.sample(range(12), 9), draw.sample(range(40), 9)
    with nothing_waits():
        host.copy_out(kv, out, places)
        kv.data.fill_(77)
        host.copy_in(kv, back, places)
        again = kv.data.clone()
        host.copy_out(
            kv, back[::-1], places
        )  # written again at once: what was put in line before has read them
    assert torch.equal(again[:, back], before[:, out])
    rest = [block for block in range(40) if block not in back]
    assert (again[:, rest] == 77).all()
    for block, place in zip(back[::-1], places, strict=True):
        assert torch.equal(host.data[place].to(DEVICE), again[:, block])


def outputs(model: Model, mode: str, num_blocks: int, depth: int, has_graphs: bool) -> list[tuple[int, ...]]:
    """Greedy tokens; with a small pool most requests are preempted on the way."""
    limits = Limits(24, 4, 64, block_size=16, num_blocks=num_blocks, num_cpu_blocks=12)
    spec = policy("mixed", preemption_mode=mode, watermark=0.0)
    engine = Engine(model, tiny_model()[1], spec, limits, overlap_depth=depth, seed=0)
    runner, draw = engine.runner, random.Random(1)
    assert isinstance(runner, ModelRunner)
    if has_graphs:
        capture = cuda_capture() if IS_CUDA else lambda run: run
        runner.graphs = DecodeGraphs(model, runner.kv, (1, 2, 4), 64, capture)
        assert len(list(runner.graphs.record())) == 3
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (10, 27, 14, 13)]
    states = [engine.submit(prompt, params)[0] for prompt in prompts]
    with nothing_waits():
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
    swapped = sum(engine.record().array("steps", "num_blocks_swapped_in").tolist())
    engine.close()
    assert (swapped > 0) == (mode == "swap")
    return [state.completion().token_ids for state in states]


@pytest.mark.parametrize(("kv_cache_dtype", "depth"), [("auto", 1), ("fp8", 0)])
def test_an_engine_that_swaps_says_what_one_with_room_says(kv_cache_dtype: str, depth: int) -> None:
    config = ModelConfig.from_hf(CONFIG)
    model = Model(
        config,
        random_weights(config, 7),
        dtype=torch.float32,
        device=DEVICE,
        attention="triton",
        kv_cache_dtype=kv_cache_dtype,
    )
    expected = outputs(model, "recompute", 20, 0, False)
    assert outputs(model, "swap", 5, depth, has_graphs=True) == expected


def test_the_bench_times_what_was_copied() -> None:
    kv = KVCache(2, 30, 16, 2, 64, torch.bfloat16, DEVICE)
    bench = SwapBench(kv, (1, 4, 16, 64))
    assert bench.cases == [(way, count) for way in ("out", "in") for count in (1, 4, 16)]
    assert all(bench.measure(*case) > 0 for case in bench.cases)
