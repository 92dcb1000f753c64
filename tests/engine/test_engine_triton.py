"""The whole engine on our kernels (in Triton's interpreter without a GPU): the tokens are those of `reference`."""

from functools import cache

import pytest
import torch
from engine_models import engine_of, greedy, hf_config, ids_of, prompts, run_all, small_limits, tiny_model
from engine_rules import PreemptAt

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.kernel_operations import KernelOperations
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.operations import TorchOperations
from pagedserve.engine.model.weights import random_weights
from pagedserve.kernels.launching import is_interpreted
from pagedserve.policy import Policy

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
NUM_TOKENS = 5


@cache
def triton_model(kind: str) -> Model:
    """The weights of `tiny_model`."""
    config = ModelConfig.from_hf(hf_config(kind).to_dict())
    source = random_weights(config, 7)
    return Model(config, source, dtype=torch.float32, device=DEVICE, attention="triton", max_model_len=96)


def outputs(model: Model, spec: Policy, texts: list[tuple[int, ...]], depth: int) -> list[tuple[int, ...]]:
    limits = small_limits(max_num_batched_tokens=24, max_num_seqs=4, num_blocks=40)
    with engine_of(spec, limits, model=model, depth=depth) as engine:
        completions = run_all(engine, texts, greedy(NUM_TOKENS))
        assert engine.scheduler.num_preemptions >= 1
        return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(("kind", "depth"), [("llama", 0), ("qwen3", 1), ("mistral", 1)])
def test_greedy_output_equals_the_reference(kind: str, depth: int) -> None:
    """Chunks beside decodes, a preempted request, and prompts that share cached blocks."""
    texts = [*prompts(3, 6, longest=30), ids_of("the same beginning, then"), ids_of("the same beginning, and")]
    spec = Policy(batching=PreemptAt(1, 2), enable_prefix_caching=True)
    model = triton_model(kind)
    assert isinstance(model.operations, KernelOperations)
    expected = outputs(tiny_model(kind, "reference"), spec, texts, depth)
    assert outputs(model, spec, texts, depth) == expected


def test_other_backends_keep_torchs_operations() -> None:
    for attention in ("cpu", "reference"):
        assert isinstance(tiny_model("llama", attention).operations, TorchOperations)
