"""Tiny random models, a byte-level tokenizer, and engines around them for token-level tests."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from model_checkpoints import hf_continuation
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagedserve.engine import runner
from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.engine import Engine
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import random_weights
from pagedserve.engine.outputs import Completion, CompletionState, Delta
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.rows import SamplingBatch
from pagedserve.engine.sampling.sampler import SampledTokens, sample
from pagedserve.policy import Limits, Policy, policy

# Matrices this small lose more to the threads' barriers than they gain, most of all on a busy machine.
torch.set_num_threads(1)

KINDS = ("llama", "mistral", "qwen2", "qwen3")
RULES = ("serial", "static", "prefill_first", "mixed", "vllm_v1")
MAX_MODEL_LEN = 96
EOS = 256
NUM_TOKENS = 258
_WEIGHTS_SEED = 7


@cache
def tokenizer() -> Tokenizer:
    """One token for each byte, then an end mark (256) and another special token (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|user|>", special=True)])
    assert made.get_vocab_size() == NUM_TOKENS
    return made


def ids_of(text: str) -> list[int]:
    """Token ids of a text, one for each of its UTF-8 bytes."""
    return tokenizer().encode(text).ids


@cache
def vocabulary() -> Vocabulary:
    """The tokenizer as the engine takes it; the end mark is the only EOS."""
    return Vocabulary(NUM_TOKENS, frozenset([EOS]), TokenPieces(tokenizer()), ids_of)


@cache
def hf_config(kind: str, vocab_size: int = NUM_TOKENS) -> Any:
    """Two layers, grouped queries; Mistral's window is shorter than most sequences here."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if kind == "mistral":
        sizes["sliding_window"] = 13
    if kind == "qwen2":
        del sizes["head_dim"]
    config = classes[kind](**sizes)
    config.architectures = [f"{kind.capitalize()}ForCausalLM"]
    return config


@cache
def tiny_model(kind: str = "llama", attention: str = "cpu", vocab_size: int = NUM_TOKENS) -> Model:
    """The engine's model in float32; weights from a fixed seed."""
    config = ModelConfig.from_hf(hf_config(kind, vocab_size).to_dict())
    source = random_weights(config, _WEIGHTS_SEED)
    return Model(config, source, dtype=torch.float32, attention=attention)


@cache
def hf_model(kind: str) -> Any:
    """The same model in transformers."""
    from transformers import AutoModelForCausalLM

    config = hf_config(kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    source = random_weights(ModelConfig.from_hf(config.to_dict()), _WEIGHTS_SEED)
    missing, unexpected = model.load_state_dict(dict(source.items()), strict=False)
    assert not missing
    assert not unexpected
    return model


@cache
def hf_greedy(kind: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What ``transformers`` generates greedily behind the prompt, one sequence at a time."""
    return hf_continuation(hf_model(kind), prompt, num_tokens)


@cache
def prompts(count: int, seed: int = 0, longest: int = 40) -> tuple[tuple[int, ...], ...]:
    """Random prompts of mixed lengths; every third shares a prefix with the one before."""
    rng = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for index in range(count):
        own = tuple(rng.randrange(256) for _ in range(rng.randint(1, longest)))
        shared = made[-1][: rng.randint(0, len(made[-1]))] if index % 3 == 2 else ()
        made.append((shared + own)[:longest])
    return tuple(made)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters that run to ``max_tokens``."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options})


def small_limits(**changes: int | None) -> Limits:
    """Eight seats, and a pool of 256 tokens in blocks of 4."""
    numbers: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 4,
        "num_blocks": 64,
    }
    return Limits(**{**numbers, **changes})


@contextmanager
def engine_of(
    spec: str | Policy = "mixed",
    limits: Limits | None = None,
    *,
    model: Model | None = None,
    depth: int = 0,
    seed: int | None = 0,
    vocab: Vocabulary | None = None,
) -> Iterator[Engine]:
    """An engine around a tiny model, closed at the end."""
    engine = Engine(
        model or tiny_model(),
        vocab or vocabulary(),
        spec if isinstance(spec, Policy) else policy(spec),
        limits or small_limits(),
        overlap_depth=depth,
        seed=seed,
    )
    try:
        yield engine
    finally:
        engine.close()


def drain(engine: Engine, each: Callable[[], None] = lambda: None, most: int = 20_000) -> int:
    """Step until nothing is left, examining every invariant after each; return the number of steps.

    ``each`` is called after every step. Fails if the engine stands still with work in hand.
    """
    steps = 0
    while engine.has_work:
        assert engine.step() or not engine.has_work, f"stuck with {engine.num_live} live requests"
        engine.scheduler.check()
        each()
        steps += 1
        assert steps < most, "no end in sight"
    return steps


def run_all(
    engine: Engine, texts: Sequence[Sequence[int] | str], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """One completion for each prompt, all handed in at once; then nothing may be left behind."""
    each = [params] * len(texts) if isinstance(params, SamplingParams) else params
    states = [engine.submit(text, own)[0] for text, own in zip(texts, each, strict=True)]
    drain(engine)
    assert_drained(engine)
    return [state.completion() for state in states]


def run_scrambled(
    engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams, seed: int
) -> list[Completion]:
    """As `run_all`, but handed in at random moments and in random order."""
    rng = random.Random(seed)
    left = list(range(len(texts)))
    rng.shuffle(left)
    states: dict[int, CompletionState] = {}
    while left or engine.has_work:
        while left and rng.random() < 0.4:
            index = left.pop()
            states[index] = engine.submit(texts[index], params)[0]
        engine.step()
        engine.scheduler.check()
    assert_drained(engine)
    return [states[index].completion() for index in range(len(texts))]


def assert_nothing_held(engine: Engine) -> None:
    """No request lives and no block is used; what the worker has departs with the next plan."""
    scheduler = engine.scheduler
    scheduler.check()
    assert not engine.has_work
    assert engine.num_live == 0
    assert scheduler.allocator.num_free_blocks == scheduler.limits.num_blocks
    assert scheduler.allocator.num_quarantined_blocks == scheduler.allocator.num_live_tokens == 0
    assert not engine.runner._newcomers
    assert not engine.runner._launched


def assert_drained(engine: Engine) -> None:
    """CASES A5: no block, seat, sampling row or sequence outlives its request.

    The worker hears of departures with the next plan, so one more request is sent, and only it may be there.
    """
    assert_nothing_held(engine)
    (probe,) = engine.submit([1], greedy(1))
    while engine.has_work:
        assert engine.step() or not engine.has_work
    assert probe.finish_reason == "length"
    worker, own = engine.runner, {probe.sequence.request.id}
    assert set(worker.table.sequences) <= own
    assert set(worker.rows._slots) <= own
    assert len(worker.table._free_seats) >= engine.limits.max_num_seqs - 1
    assert_nothing_held(engine)


@contextmanager
def scripted(engine: Engine, script: Callable[[int], Sequence[int]]) -> Iterator[None]:
    """Let the model want ``script(request)[i]`` as output token i, by a far higher logit; then the lowest id.

    Only the logits are replaced: sampling, suppression, stops and everything after are the engine's own.
    Tokens count from here on, as they are sampled: the engine learns of them later.
    """
    counts: dict[int, int] = {}

    def sample_script(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        for row, request in enumerate(batch.layout.requests):
            wanted, index = script(request), counts.get(request, 0)
            counts[request] = index + 1
            logits[row] = 0.0
            if index < len(wanted):
                logits[row, wanted[index]] = 100.0
        return sample(logits, batch)

    with mock.patch.object(runner, "sample", sample_script):
        yield


class Heard:
    """A listener that keeps everything it is told, by request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def __call__(self, delta: Delta) -> None:
        ended = [d for d in self.deltas if d.request == delta.request and d.finish_reason is not None]
        assert not ended, f"{delta} after {ended[-1]}"
        self.deltas.append(delta)

    def tokens(self, request: int) -> list[int]:
        """Token ids told of one request."""
        return [token for d in self.deltas if d.request == request for token in d.token_ids]

    def text(self, request: int) -> str:
        """Text told of one request."""
        return "".join(d.text for d in self.deltas if d.request == request)

    def reasons(self, request: int) -> list[str]:
        """Finish reasons told of one request: exactly one, once it has ended."""
        return [d.finish_reason for d in self.deltas if d.request == request and d.finish_reason is not None]
