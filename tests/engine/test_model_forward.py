"""The forward pass against transformers, in float32, and against itself for every way to cut the work."""

import pytest
import torch
from model_checkpoints import (
    FAMILY,
    chunked_logits,
    dirty_cache,
    hf_logits,
    hf_model,
    our_model,
    prompt,
    scattered_blocks,
)

from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.model import Model
from pagedserve.kernels.kv_cache import KVCache

TOLERANCE = 4e-5  # logits here are about 8 at most; measured differences stay below 2e-5


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_logits_equal_transformers_for_every_chunk_size(name: str, attention: str) -> None:
    model, tokens = our_model(name, attention), prompt(45)
    expected = hf_logits(name, tokens)
    for chunk in (len(tokens), 7, 1):
        torch.testing.assert_close(chunked_logits(model, tokens, chunk), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["llama", "llama-one-kv-head-linear", "mistral-window", "qwen3"])
def test_chunk_sizes_and_block_sizes_give_the_same_bits(name: str, attention: str) -> None:
    model, tokens = our_model(name, attention), prompt(45)
    whole = chunked_logits(model, tokens, len(tokens))
    assert_same_bits(chunked_logits(model, tokens, 1), whole)
    assert_same_bits(chunked_logits(model, tokens, 7), whole)
    assert_same_bits(chunked_logits(model, tokens, 16, block_size=16), whole)


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_chunk_sizes_give_the_same_bits_in_bfloat16(attention: str) -> None:
    model, tokens = our_model("llama", attention, torch.bfloat16), prompt(150)
    whole = chunked_logits(model, tokens, len(tokens))
    for chunk in (1, 7, 64):
        out = chunked_logits(model, tokens, chunk)
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert torch.equal(out, whole)
        else:
            assert (out.log_softmax(-1) - whole.log_softmax(-1)).abs().mean() < 0.1


def assert_same_bits(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Bits where the CPU libraries were measured to keep them, rounding elsewhere."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)


class Requests:
    """Sequences that share a dirty cache and are computed in whatever steps a test likes."""

    def __init__(self, model: Model, prompts: list[list[int]], room: int, block_size: int = 4) -> None:
        self.model, self.block_size = model, block_size
        self.tokens = [list(tokens) for tokens in prompts]
        self.computed = [0] * len(prompts)
        counts = [-(-(len(tokens) + room) // block_size) for tokens in prompts]
        order = scattered_blocks(sum(counts) + 5, sum(counts), seed=4)
        self.blocks = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
        self.kv: KVCache = dirty_cache(model, sum(counts) + 5, block_size)

    def step(self, sizes: dict[int, int]) -> None:
        """Compute ``sizes[i]`` tokens of sequence i; one that has none left to know gets its greedy next token."""
        chunks = []
        for index, size in sizes.items():
            start = self.computed[index]
            chunks.append(SequenceChunk(self.tokens[index][start : start + size], start, self.blocks[index]))
            self.computed[index] += len(chunks[-1].token_ids)
        hidden = self.model.forward(make_batch(chunks, self.block_size), self.kv)
        ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0) - 1
        for index, token in zip(sizes, self.model.logits(hidden[ends]).argmax(-1).tolist(), strict=True):
            if self.computed[index] == len(self.tokens[index]):
                self.tokens[index].append(token)


def hf_greedy(name: str, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():  # without a mask, generate takes a 0 in the prompt for padding
        out = hf_model(name).generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0].tolist()


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_greedy_output_in_mixed_batches_equals_transformers(name: str, attention: str) -> None:
    """B1: chunks of prefill and decodes of other sequences in one batch, in changing company."""
    prompts = [prompt(length, seed=length) for length in (5, 23, 1, 40)]
    requests = Requests(our_model(name, attention), prompts, room=12)
    for sizes in ({0: 5, 1: 10}, {2: 1, 0: 1, 1: 10}, {3: 17, 0: 1, 1: 3, 2: 1}, {0: 1, 2: 1, 3: 23}):
        requests.step(sizes)
    while min(len(tokens) - len(start) for tokens, start in zip(requests.tokens, prompts, strict=True)) < 12:
        short = [i for i in range(4) if len(requests.tokens[i]) - len(prompts[i]) < 12]
        requests.step(dict.fromkeys(short, 1))
    for tokens, start in zip(requests.tokens, prompts, strict=True):
        assert tokens[: len(start) + 12] == hf_greedy(name, start, 12)


def test_a_sequence_has_the_same_logits_alone_and_in_a_batch_of_64() -> None:
    model, tokens = our_model("llama"), prompt(30)
    alone = chunked_logits(model, tokens, 30)[-1]
    others = [prompt(3 + 2 * n % 50, seed=n) for n in range(63)]
    requests = Requests(model, [*others[:40], tokens, *others[40:]], room=1)
    chunks = [SequenceChunk(t, 0, b) for t, b in zip(requests.tokens, requests.blocks, strict=True)]
    hidden = model.forward(make_batch(chunks, 4), requests.kv)
    end = sum(len(chunk.token_ids) for chunk in chunks[:41]) - 1
    assert_same_bits(model.logits(hidden[end : end + 1])[0], alone)


def test_recomputing_a_suffix_over_kept_blocks_equals_computing_all() -> None:
    """What a prefix hit does: the first blocks are another sequence's, the rest is computed."""
    model, tokens = our_model("qwen3"), prompt(22)
    kv = dirty_cache(model, 20, 4)
    model.forward(make_batch([SequenceChunk(tokens[:16], 0, [9, 2, 7, 5])], 4), kv)
    hidden = model.forward(make_batch([SequenceChunk(tokens[16:], 16, [9, 2, 7, 5, 11, 3])], 4), kv)
    torch.testing.assert_close(model.logits(hidden), hf_logits("qwen3", tokens)[16:], atol=TOLERANCE, rtol=0)


def test_two_sequences_of_one_step_may_share_blocks() -> None:
    model, tokens = our_model("llama"), prompt(20)
    kv = dirty_cache(model, 20, 4)
    model.forward(make_batch([SequenceChunk(tokens[:16], 0, [0, 1, 2, 3])], 4), kv)
    both = [SequenceChunk(tokens[16:], 16, [0, 1, 2, 3, 4]), SequenceChunk([5, 6], 16, [0, 1, 2, 3, 5])]
    logits = model.logits(model.forward(make_batch(both, 4), kv))
    torch.testing.assert_close(logits[:4], hf_logits("llama", tokens)[16:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        logits[4:], hf_logits("llama", [*tokens[:16], 5, 6])[16:], atol=TOLERANCE, rtol=0
    )


def test_a_wrong_block_is_noticed() -> None:
    """The comparisons above can fail: one exchanged block moves the logits."""
    model, tokens = our_model("llama"), prompt(22)
    kv = dirty_cache(model, 20, 4)
    model.forward(make_batch([SequenceChunk(tokens[:20], 0, [0, 1, 2, 3, 4])], 4), kv)
    model.forward(make_batch([SequenceChunk(prompt(4, seed=9), 0, [5])], 4), kv)
    hidden = model.forward(make_batch([SequenceChunk(tokens[20:], 20, [0, 1, 5, 3, 4, 6])], 4), kv)
    assert (model.logits(hidden) - hf_logits("llama", tokens)[20:]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(attention: str) -> None:
    tokens = prompt(45)
    exact = hf_logits("llama", tokens).log_softmax(-1)
    theirs = hf_logits("llama", tokens, torch.bfloat16).log_softmax(-1)
    ours = chunked_logits(our_model("llama", attention, torch.bfloat16), tokens, 7).log_softmax(-1)
    assert 0 < (ours - exact).abs().mean() < 1.25 * (theirs - exact).abs().mean()


def test_a_chunk_needs_tokens_and_slots() -> None:
    with pytest.raises(ValueError, match="chunk 1: 5 tokens from position 4 on 2 blocks of 4"):
        make_batch([SequenceChunk([1], 0, [0]), SequenceChunk([1] * 5, 4, [1, 2])], 4)
    with pytest.raises(ValueError, match="chunk 0: 0 tokens"):
        make_batch([SequenceChunk([], 0, [0])], 4)


def test_a_position_beyond_the_model_is_an_error() -> None:
    model = our_model("llama")
    kv = model.make_cache(200, 4)
    with pytest.raises(IndexError):
        model.forward(make_batch([SequenceChunk([1], 512, list(range(200)))], 4), kv)
