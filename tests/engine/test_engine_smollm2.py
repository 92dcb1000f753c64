"""SmolLM2-135M-Instruct in float32: the engine's greedy output equals transformers' under every rule."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_models import RULES, assert_drained, run_scrambled
from engine_rules import ChunksOf, PreemptAtRandom
from model_checkpoints import hf_continuation

from pagedserve.engine.engine import Engine
from pagedserve.engine.llm import vocabulary_of
from pagedserve.engine.model.fetch import PACKAGED_MODELS, cache_home
from pagedserve.engine.model.load import LoadedModel, load_model
from pagedserve.engine.model.tokenizer import load_tokenizer
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import Limits, Policy, policy
from pagedserve.validation.decisions import check_decisions

pytestmark = pytest.mark.long

NAME = "smollm2-135m"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Repeat after me, word for word: paged attention keeps keys and values in blocks of a fixed size.",
    "2 + 2 =",
)
LENGTH = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def all_threads() -> Iterator[None]:
    """The tiny models of the other tests run on one thread; this one gains from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    file = cache_home() / "models" / NAME / PACKAGED_MODELS[NAME].member.rpartition("/")[2]
    if not file.is_file():
        pytest.skip(
            f"{NAME} is not in the cache ({file}); `pagedserve generate --model {NAME} Hi` fetches it"
        )
    return load_model(file, dtype="float32")


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(loaded.files)
    turns = ([{"role": "user", "content": question}] for question in QUESTIONS)
    rendered = (tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False) for t in turns)
    return [tuple(tokenizer.encode(str(text))) for text in rendered]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel, texts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    path = loaded.files.path
    hf: Any = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    return [hf_continuation(hf, text, LENGTH) for text in texts]


SPECS = {
    **{rule: policy(rule) for rule in RULES},
    "no cache": policy("vllm_v1", enable_prefix_caching=False),
    "chunks of 7": Policy(batching=ChunksOf(7), enable_prefix_caching=True),
    "preempted": Policy(batching=PreemptAtRandom(4, 0.04), enable_prefix_caching=True),
    "contiguous": policy("mixed", allocator="contiguous_limit"),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", SPECS)
def test_greedy_output_equals_transformers(
    loaded: LoadedModel,
    texts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    name: str,
    depth: int,
) -> None:
    """Handed in at random moments, on few blocks, so that requests wait and are preempted."""
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=192, num_blocks=16)
    vocabulary = vocabulary_of(loaded, load_tokenizer(loaded.files))
    engine = Engine(loaded.model, vocabulary, SPECS[name], limits, overlap_depth=depth)
    completions = run_scrambled(engine, texts, GREEDY, seed=depth)
    assert [completion.token_ids for completion in completions] == expected
    assert_drained(engine)
    assert name == "preempted" or check_decisions(engine.record(), SPECS[name]).first_difference is None
    engine.close()
