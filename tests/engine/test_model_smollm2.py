"""SmolLM2-135M-Instruct, fetched as a GGUF file: greedy output and logits against transformers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from model_checkpoints import hf_continuation

from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.model.errors import FetchError
from pagedserve.engine.model.files import ModelFiles, resolve_model
from pagedserve.engine.model.load import load_model
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.tokenizer import eos_token_ids, load_tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write one line about paging in operating systems, please. " * 4,
)
COUNT = 24
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve_model("smollm2-135m", progress=False)
    except FetchError as error:
        pytest.skip(f"smollm2-135m cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def model(files: ModelFiles) -> Model:
    return load_model(files.path, dtype="float32").model


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = load_tokenizer(files)
    turns = ([{"role": "user", "content": question}] for question in QUESTIONS)
    texts = [tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False) for t in turns]
    return [tokenizer.encode(str(text)) for text in texts]


@pytest.fixture(scope="module")
def hf(files: ModelFiles) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(files.path.parent), gguf_file=files.path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def expected(hf: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Prompt and greedy continuation of each prompt, by transformers."""
    return [[*tokens, *hf_continuation(hf, tokens, COUNT)] for tokens in prompts]


def greedy(model: Model, prompts: Sequence[list[int]], chunk: int) -> list[list[int]]:
    """Continue all prompts together, each in chunks; blocks alternate between the sequences."""
    kv = model.make_cache(64, BLOCK_SIZE)
    tables = [list(range(n, 64, len(prompts))) for n in range(len(prompts))]
    tokens, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while True:
        open_ones = [n for n, prompt in enumerate(prompts) if len(tokens[n]) < len(prompt) + COUNT]
        if not open_ones:
            return tokens
        parts = [SequenceChunk(tokens[n][computed[n] :][:chunk], computed[n], tables[n]) for n in open_ones]
        hidden = model.forward(make_batch(parts, BLOCK_SIZE), kv)
        ends = torch.tensor([len(part.token_ids) for part in parts]).cumsum(0) - 1
        best = model.logits(hidden[ends]).argmax(-1).tolist()
        for n, part, token in zip(open_ones, parts, best, strict=True):
            computed[n] += len(part.token_ids)
            if computed[n] == len(tokens[n]):
                tokens[n].append(token)


@pytest.mark.parametrize("chunk", [7, 64])
def test_greedy_output_equals_transformers(
    model: Model, prompts: list[list[int]], expected: list[list[int]], chunk: int
) -> None:
    assert greedy(model, prompts, chunk) == expected


def test_logits_equal_transformers(model: Model, hf: Any, expected: list[list[int]]) -> None:
    for tokens in expected:
        with torch.no_grad():
            theirs = hf(torch.tensor([tokens])).logits[0]
        kv = model.make_cache(32, BLOCK_SIZE)
        ours = model.logits(model.forward(make_batch([SequenceChunk(tokens, 0, range(32))], BLOCK_SIZE), kv))
        # Logits reach 40 here: 1e-4 is four units in the last place of float32.
        assert (ours - theirs).abs().max() < 2e-4
        assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < 2e-4


def test_bfloat16_logprobs_are_near_the_float32_ones(
    files: ModelFiles, model: Model, expected: list[list[int]]
) -> None:
    """Teacher-forced: the mean over the text of each token's logprob difference. transformers' is 0.1 as well."""
    narrow = load_model(files.path, dtype="bfloat16").model
    for tokens in expected:
        logprobs = []
        for each in (model, narrow):
            kv = each.make_cache(32, BLOCK_SIZE)
            hidden = each.forward(make_batch([SequenceChunk(tokens, 0, range(32))], BLOCK_SIZE), kv)
            every = each.logits(hidden[:-1]).log_softmax(-1)
            logprobs.append(every.gather(1, torch.tensor(tokens[1:])[:, None]))
        assert (logprobs[0] - logprobs[1]).abs().mean() < 0.15


def test_tokenizer_and_end_ids(files: ModelFiles) -> None:
    tokenizer = load_tokenizer(files)
    text = "Hello wörld 😀 <|im_start|>user\n don't"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert eos_token_ids(files, tokenizer) == set(tokenizer.encode("<|im_end|>"))
