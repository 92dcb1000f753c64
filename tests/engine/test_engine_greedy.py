"""Greedy output equals transformers' whatever the batching, the chunks, the cache, the depth, the allocator."""

import itertools
from collections.abc import Sequence

import pytest
from engine_models import (
    KINDS,
    RULES,
    engine_of,
    greedy,
    hf_greedy,
    ids_of,
    prompts,
    run_all,
    run_scrambled,
    small_limits,
    tiny_model,
)
from engine_rules import ChunksOf

from pagedserve.engine.outputs import Completion
from pagedserve.policy import Limits, Policy, policy

NUM_TOKENS = 10
# Token budget and seats: prompts are cut where the budget ends, beside the decodes.
BUDGETS = {"1": (1, 1), "7": (7, 3), "64": (64, 8), "whole": (1024, 16)}
CACHES = (False, True)
DEPTHS = (0, 1)
ALLOCATORS = ("paged", "contiguous_max", "contiguous_limit")


def limits_of(budget: str, num_blocks: int = 64) -> Limits:
    tokens, seats = BUDGETS[budget]
    return small_limits(max_num_batched_tokens=tokens, max_num_seqs=seats, num_blocks=num_blocks)


def assert_equal_to_hf(
    kind: str, texts: Sequence[tuple[int, ...]], completions: Sequence[Completion]
) -> None:
    for text, completion in zip(texts, completions, strict=True):
        assert completion.finish_reason == "length"
        assert completion.prompt_token_ids == text
        assert completion.token_ids == hf_greedy(kind, text, NUM_TOKENS), f"prompt {text}"


def compare(kind: str, attention: str, spec: Policy, limits: Limits, depth: int, seed: int = 0) -> None:
    texts = prompts(9, seed)
    with engine_of(spec, limits, model=tiny_model(kind, attention), depth=depth) as engine:
        assert_equal_to_hf(kind, texts, run_all(engine, texts, greedy(NUM_TOKENS)))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_budget(rule: str, budget: str) -> None:
    """Every rule and budget; cache, depth and attention are rotated through all their combinations."""
    rest = list(itertools.product(CACHES, DEPTHS, ("cpu", "reference")))
    first = 2 * (RULES.index(rule) + list(BUDGETS).index(budget))
    for caches, depth, attention in (rest * 2)[first % 8 : first % 8 + 2]:
        spec = policy(rule, enable_prefix_caching=caches)
        compare("llama", attention, spec, limits_of(budget), depth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_kind_of_model_in_chunks(kind: str, size: int) -> None:
    """The batch is full and every prompt is cut into chunks of exactly ``size`` tokens."""
    depth = size % 2
    spec = Policy(batching=ChunksOf(size), enable_prefix_caching=size != 7)
    compare(kind, "cpu", spec, limits_of("whole"), depth, seed=1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_allocator_under_pressure(allocator: str, depth: int) -> None:
    """Few blocks: requests wait, and with the paged allocator they are preempted."""
    texts = prompts(9, 2)
    spec = policy("mixed", allocator=allocator, watermark=0.0)
    limits = limits_of("64", num_blocks=24)
    with engine_of(spec, limits, depth=depth) as engine:
        completions = run_all(engine, texts, greedy(NUM_TOKENS))
        assert (engine.scheduler.num_preemptions > 0) == (allocator == "paged")
    assert_equal_to_hf("llama", texts, completions)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16])
def test_b1_the_batch_does_not_change_the_output(count: int) -> None:
    """B1: every prompt alone (transformers) and inside batches of 1 to 16 gives the same tokens."""
    texts = prompts(16, 3)[-count:]
    with engine_of("vllm_v1", limits_of("whole")) as engine:
        assert_equal_to_hf("llama", texts, run_all(engine, texts, greedy(NUM_TOKENS)))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rule", RULES)
def test_b1_arrival_does_not_change_the_output(rule: str, depth: int) -> None:
    """B1: the same prompts in random order and at random moments."""
    texts = prompts(9, 3)
    with engine_of(rule, limits_of("64", num_blocks=40), depth=depth) as engine:
        for seed in range(2):
            assert_equal_to_hf("llama", texts, run_scrambled(engine, texts, greedy(NUM_TOKENS), seed))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_block_size(block_size: int) -> None:
    """Blocks of one token, of a size that is no power of two, and of most of a prompt."""
    limits = small_limits(block_size=block_size, num_blocks=192 // block_size)
    texts = prompts(9, 4)
    with engine_of("vllm_v1", limits, depth=1) as engine:
        assert_equal_to_hf("llama", texts, run_all(engine, texts, greedy(NUM_TOKENS)))


def test_text_prompts_equal_their_ids() -> None:
    """A prompt given as text and as ids is the same prompt."""
    text = "Grüße, 世界"
    with engine_of() as engine:
        for completion in run_all(engine, [text, ids_of(text)], greedy(6)):
            assert completion.prompt_token_ids == tuple(ids_of(text))
            assert completion.token_ids == hf_greedy("llama", tuple(ids_of(text)), 6)


@pytest.mark.long
@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_everything_with_everything(rule: str, kind: str, attention: str) -> None:
    """The full product, and two pools."""
    choices = itertools.product(BUDGETS, CACHES, DEPTHS, ALLOCATORS, (26, 64))
    for budget, caches, depth, allocator, num_blocks in choices:
        if caches and allocator != "paged":
            continue
        spec = policy(rule, allocator=allocator, enable_prefix_caching=caches)
        compare(kind, attention, spec, limits_of(budget, num_blocks), depth, seed=5)
