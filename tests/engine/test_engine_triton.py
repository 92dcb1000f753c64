"""The whole engine on our kernels (in Triton's interpreter without a GPU): the tokens are those of `reference`."""

from functools import cache

import pytest
import torch
from engine_models import engine_of, greedy, hf_config, ids_of, prompts, run_all, small_limits, tiny_model
from engine_rules import PreemptAt

from pagedserve.engine.kv_memory import block_bytes_of
from pagedserve.engine.model.batch import SequenceChunk, make_batch
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
        engine.runner.kv.data[:, : limits.num_blocks] = float(
            "nan"
        )  # what no token was written to is not read
        completions = run_all(engine, texts, greedy(NUM_TOKENS))
        assert engine.scheduler.num_preemptions == 1
        steps = engine.record().steps
        assert sum(steps["num_prefix_hit_tokens"].to_pylist()) > 0
        both = zip(
            steps["num_prefill_tokens"].to_pylist(), steps["num_decode_tokens"].to_pylist(), strict=True
        )
        assert any(prefill and decode for prefill, decode in both)
        return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(("kind", "depth"), [("llama", 0), ("qwen3", 1), ("mistral", 1)])
def test_greedy_output_equals_the_reference(kind: str, depth: int) -> None:
    """Chunks beside decodes, a preempted request, and prompts that share cached blocks."""
    texts = [
        *prompts(3, 6, longest=30),
        ids_of("the same beginning, then"),
        ids_of("the same beginning, and"),
    ]
    spec = Policy(batching=PreemptAt(1, 2), enable_prefix_caching=True)
    model = triton_model(kind)
    assert isinstance(model.operations, KernelOperations)
    expected = outputs(tiny_model(kind, "reference"), spec, texts, depth)
    assert outputs(model, spec, texts, depth) == expected


def last_logits(model: Model, kv_device: torch.device) -> torch.Tensor:
    """Of a prompt in one chunk, and of another that goes on after its first eleven tokens."""
    kv, texts = model.make_cache(16, 4), prompts(2, 8)
    blocks = [3, 11, 2, 9, 7, 0, 5], [8, 1, 6, 10, 4, 12, 14, 13, 15]
    kv.data[:, :16] = float("nan")
    first = SequenceChunk(texts[1][:11], 0, blocks[1])
    model.forward(make_batch([first], 4, kv_device), kv)
    rest = SequenceChunk(texts[1][11:], 11, blocks[1])
    hidden = model.forward(make_batch([SequenceChunk(texts[0], 0, blocks[0]), rest], 4, kv_device), kv)
    return model.logits(hidden).cpu()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_the_reference(kind: str) -> None:
    expected = last_logits(tiny_model(kind, "reference"), torch.device("cpu"))
    found = last_logits(triton_model(kind), DEVICE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_other_backends_keep_torchs_operations() -> None:
    for attention in ("cpu", "reference"):
        assert isinstance(tiny_model("llama", attention).operations, TorchOperations)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_cache_of_bytes_is_near_and_takes_a_quarter(kind: str) -> None:
    """fp8: what is attended to is what torch's own e4m3 leaves of keys and values; chunk, chunk and decode."""
    config = ModelConfig.from_hf(hf_config(kind).to_dict())
    model = Model(
        config,
        random_weights(config, 7),
        dtype=torch.float32,
        device=DEVICE,
        attention="triton",
        kv_cache_dtype="fp8",
    )
    exact = triton_model(kind)
    assert block_bytes_of(model, 16) * 4 == block_bytes_of(exact, 16)
    found, expected, kv = [], [], model.make_cache(8, 4)
    assert kv.data.dtype == torch.uint8
    plain, tokens = exact.make_cache(8, 4), [3, 200, 17, 99, 5, 64, 250, 1, 7]
    for start, end in ((0, 5), (5, 8), (8, 9)):
        batch = make_batch([SequenceChunk(tokens[start:end], start, [2, 6, 0])], 4, DEVICE)
        found.append(model.logits(model.forward(batch, kv)))
        expected.append(exact.logits(exact.forward(batch, plain)))
    rounded = kv.data.view(torch.float8_e4m3fn).float()
    first = rounded[0, 2], plain.data[0, 2].to(torch.float8_e4m3fn).float()
    assert torch.equal(*first), "the first layer's, of which nothing was rounded before"
    logits, others = torch.cat(found), torch.cat(expected)
    assert not torch.equal(logits, others)
    torch.testing.assert_close(logits, others, atol=0.1 * float(others.abs().max()), rtol=0)


def test_only_our_kernels_read_bytes() -> None:
    config = ModelConfig.from_hf(hf_config("llama").to_dict())
    for attention, words in (("cpu", "attention 'cpu' cannot read"), ("reference", "use attention triton")):
        with pytest.raises(ValueError, match=f"kv_cache_dtype is fp8, .*{words}"):
            Model(
                config,
                random_weights(config, 7),
                dtype=torch.float32,
                attention=attention,
                kv_cache_dtype="fp8",
            )
