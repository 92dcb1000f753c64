"""Sampling inside the engine: the same tokens alone, in any batch, after preemption, at either depth."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_models import (
    EOS,
    NUM_TOKENS,
    drain,
    engine_of,
    greedy,
    hf_greedy,
    hf_model,
    prompts,
    run_all,
    scripted,
    small_limits,
    tiny_model,
    vocabulary,
)
from engine_rules import ChunksOf, PreemptAtRandom

from pagedserve.engine.engine import Engine
from pagedserve.engine.outputs import Completion
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.structured_outputs import StructuredOutputs
from pagedserve.policy import Policy, policy

LENGTH = 12
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.3, "top_k": 20},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.5},
    "bias": {"temperature": 1.2, "logit_bias": {17: 4.0, 18: -100.0}, "frequency_penalty": 1.0},
    "form": {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[a-f]+")},
}


def seeded(name: str, seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{**CHOICES[name], "seed": seed, "max_tokens": LENGTH, "ignore_eos": True, **options}
    )


def cases() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """A prompt and parameters of every kind, twice with different seeds."""
    texts = prompts(2 * len(CHOICES), 11)
    return [(text, seeded([*CHOICES][i % len(CHOICES)], 1000 + i)) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """Every case in an engine of its own."""
    outputs = []
    for text, params in cases():
        with engine_of("serial") as engine:
            outputs.append(run_all(engine, [text], params)[0].token_ids)
    return outputs


def schedules() -> Iterator[tuple[str, Policy, int]]:
    """Ways to run the same requests together."""
    yield "mixed", policy("mixed"), 0
    yield "overlapped", policy("vllm_v1"), 1
    yield "static", policy("static"), 1
    yield "chunks", Policy(batching=ChunksOf(3)), 0
    yield "preempted", Policy(batching=PreemptAtRandom(1, 0.05)), 0
    yield "preempted, overlapped", Policy(batching=PreemptAtRandom(2, 0.05), enable_prefix_caching=True), 1


@pytest.mark.parametrize(("spec", "depth"), [pytest.param(s, d, id=name) for name, s, d in schedules()])
def test_s1_seeded_output_does_not_depend_on_the_schedule(
    alone: list[tuple[int, ...]], spec: Policy, depth: int
) -> None:
    """S1: alone, among neighbours that join and leave, preempted or overlapped: the same tokens."""
    order = list(range(len(alone)))
    random.Random(depth).shuffle(order)
    texts, params = zip(*(cases()[index] for index in order), strict=True)
    limits = small_limits(num_blocks=40)
    with engine_of(spec, limits, depth=depth, seed=None) as engine:
        completions = run_all(engine, texts, list(params))
    assert [completion.token_ids for completion in completions] == [alone[index] for index in order]


def test_s1_seeds_and_positions_differ(alone: list[tuple[int, ...]]) -> None:
    """What is compared above is random: another seed gives another output."""
    text, params = cases()[0]
    with engine_of() as engine:
        others = run_all(engine, [text] * 5, [replace(params, seed=seed) for seed in range(5)])
    assert len({completion.token_ids for completion in others} | {alone[0]}) == 6
    assert len(set(alone[0])) > 3


@pytest.mark.parametrize("depth", [0, 1])
def test_s1_samples_of_one_prompt_differ_and_are_reproducible(depth: int) -> None:
    """S1: n = 5 gives five outputs; sample i is the same for any n, in any company."""
    text = prompts(4, 6)[2]

    def samples(n: int, *neighbours: tuple[int, ...]) -> list[tuple[int, ...]]:
        with engine_of("vllm_v1", depth=depth) as engine:
            for neighbour in neighbours:
                engine.submit(neighbour, seeded("hot", 5))
            states = engine.submit(text, seeded("plain", 77, n=n))
            drain(engine)
        assert [state.sequence.sample_index for state in states] == list(range(n))
        return [state.completion().token_ids for state in states]

    five = samples(5)
    assert len(set(five)) == 5
    assert samples(5, *prompts(6, 12)) == five
    assert samples(2, *prompts(1, 12)) == five[:2]
    assert samples(1) == five[:1]


def test_unseeded_requests_follow_the_engine_seed() -> None:
    """Without a seed one is drawn at intake: different for each request, the same for an engine's seed."""
    text, params = prompts(4, 6)[2], SamplingParams(max_tokens=LENGTH, ignore_eos=True)

    def outputs(seed: int | None) -> list[tuple[int, ...]]:
        with engine_of(seed=seed) as engine:
            return [completion.token_ids for completion in run_all(engine, [text] * 3, params)]

    first = outputs(3)
    assert len(set(first)) == 3
    assert outputs(3) == first
    assert outputs(4) != first
    assert outputs(None) != outputs(None)


def test_temperature_zero_equals_top_k_one() -> None:
    """Two ways to ask for the likeliest token."""
    texts = prompts(6, 13)
    with engine_of() as engine:
        cold = run_all(engine, texts, greedy(LENGTH))
        single = run_all(engine, texts, greedy(LENGTH, temperature=1.0, top_k=1, seed=3))
    assert [completion.token_ids for completion in cold] == [completion.token_ids for completion in single]
    assert cold[0].token_ids == hf_greedy("llama", texts[0], LENGTH)


def test_the_lowest_id_wins_a_tie() -> None:
    """All logits equal: id 0, or the lowest id that may be chosen, by temperature 0 and by top_k = 1."""
    for way in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}):
        with engine_of() as engine, scripted(engine, lambda request: ()):
            params = [greedy(4, **way), greedy(4, **way, stop_token_ids=[0, 1, 3], min_tokens=2)]
            free, early = run_all(engine, [[5], [6, 7]], params)
        assert free.token_ids == (0, 0, 0, 0)
        assert early.token_ids == (2, 2, 0)


def check_logprobs(completion: Completion, expected: torch.Tensor, num_top: int) -> None:
    """``expected`` [tokens, vocabulary]: what transformers gives."""
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, position, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        assert position.chosen.token_id == token_id
        assert position.chosen.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert position.chosen.rank == 1 + int((row > row[token_id]).sum())
        best = row.topk(num_top)
        assert [top.token_id for top in position.top] == best.indices.tolist()
        assert [top.logprob for top in position.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("spec", "depth"), [pytest.param(s, d, id=name) for name, s, d in schedules()])
def test_logprobs_are_the_models_own_whatever_the_schedule(spec: Policy, depth: int) -> None:
    """Before temperature and filters, for each sampled token and the likeliest three: as transformers has it."""
    texts = prompts(5, 14)
    params = [seeded([*CHOICES][i], i, logprobs=3) for i in range(4)] + [seeded("hot", 9)]
    with engine_of(spec, small_limits(num_blocks=40), depth=depth) as engine:
        completions = run_all(engine, texts, params)
    assert completions[4].logprobs is None
    for text, completion in zip(texts[:4], completions[:4], strict=True):
        with torch.inference_mode():
            logits = hf_model("llama")(torch.tensor([text + completion.token_ids])).logits[0]
        check_logprobs(completion, logits[len(text) - 1 : -1].log_softmax(-1), 3)


def test_s3_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    """S3: a ValueError names the option, the place and the id; neighbours and the engine are unharmed."""
    text = prompts(4, 6)[1]
    with engine_of() as engine:
        (healthy,) = engine.submit(text, greedy(LENGTH))
        engine.step()
        for bad in (-1, NUM_TOKENS, 1 << 40):
            with pytest.raises(ValueError, match=rf"prompt\[2\] is {bad}; the model's ids are 0 to 257"):
                engine.submit([1, 2, bad], greedy(2))
            with pytest.raises(ValueError, match=rf"stop_token_ids\[1\] is {bad}"):
                engine.submit([1], greedy(2, stop_token_ids=[0, bad]))
        with pytest.raises(ValueError, match="logprobs is 259; the vocabulary has 258 tokens"):
            engine.submit([1], greedy(2, logprobs=NUM_TOKENS + 1))
        assert engine.num_live == 1
        drain(engine)
    assert healthy.completion().token_ids == hf_greedy("llama", text, LENGTH)


@pytest.mark.parametrize("name", CHOICES.keys() - {"form"})  # whose grammar allows no padded row anyway
def test_s3_padded_rows_are_never_sampled(name: str) -> None:
    """S3: rows behind the tokenizer's last id are not tokens, however large their logits."""
    model = tiny_model(vocab_size=320)

    def run(vocab_size: int) -> set[int]:
        vocab = replace(vocabulary(), size=vocab_size)
        with engine_of(model=model, vocab=vocab) as engine:
            params = seeded(name, 8, max_tokens=40)
            outputs = run_all(engine, prompts(8, 15), params)
        return {token for completion in outputs for token in completion.token_ids}

    assert max(run(NUM_TOKENS)) < NUM_TOKENS
    assert max(run(320)) >= NUM_TOKENS, "the padded rows are never likely, so nothing was tried"


def run_script(engine: Engine, script: list[int], params: SamplingParams) -> Completion:
    with scripted(engine, lambda request: script):
        return run_all(engine, [[65]], params)[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_s4_min_tokens_suppresses_eos_and_stop_ids(depth: int) -> None:
    """S4: before min_tokens no EOS and no stop id is chosen, whatever its logit; after it they end the output."""
    vocab = replace(vocabulary(), eos_token_ids=frozenset([EOS, 10]))
    wants = [EOS, 10, 66, 20, 67, 10, 68]
    with engine_of(vocab=vocab, depth=depth) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=5, stop_token_ids=[20, 0])
        completion = run_script(engine, wants, params)
        assert completion.token_ids == (1, 1, 66, 1, 67, 10)
        assert (completion.finish_reason, completion.stop) == ("stop", 10)
        params = SamplingParams(temperature=0.0, max_tokens=20)
        completion = run_script(engine, wants, params)
        assert completion.token_ids == (EOS,)
        assert (completion.finish_reason, completion.stop, completion.text) == ("stop", EOS, "")


@pytest.mark.parametrize("depth", [0, 1])
def test_s4_min_tokens_lets_stop_strings_pass(depth: int) -> None:
    """S4: a stop string completed early is text; completed later, it ends the output."""
    with engine_of(depth=depth) as engine:
        wants = list(engine.vocabulary.encode("abXYcdXYef"))
        params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=5, stop="XY")
        completion = run_script(engine, wants, params)
    assert (completion.text, completion.stop) == ("abXYcd", "XY")
    assert len(completion.token_ids) == 8


@pytest.mark.parametrize("depth", [0, 1])
def test_s4_ignore_eos_ignores_every_eos(depth: int) -> None:
    """S4: all EOS ids of the model are ignored, a stop id of one's own is not, even if it is one of them."""
    vocab = replace(vocabulary(), eos_token_ids=frozenset([EOS, 10, 11]))
    with engine_of(vocab=vocab, depth=depth) as engine:
        completion = run_script(engine, [EOS, 10, 11, 66, 11], greedy(4))
        assert completion.token_ids == (EOS, 10, 11, 66)
        assert completion.finish_reason == "length"
        completion = run_script(engine, [EOS, 10, 11, 66], greedy(9, stop_token_ids=[11]))
        assert completion.token_ids == (EOS, 10, 11)
        assert (completion.finish_reason, completion.stop) == ("stop", 11)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_s2_a_repetition_penalty_gives_what_transformers_gives(penalty: float) -> None:
    """CASES S2: prompt and output count; among neighbours with other penalties."""
    texts = prompts(5, 21)
    params = [greedy(50, repetition_penalty=penalty), *[greedy(50, frequency_penalty=2.0)] * 4]
    with engine_of("mixed") as engine:
        made = run_all(engine, texts, params)[0]
    model = hf_model("llama")
    ids = torch.tensor([texts[0]])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=50,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert list(made.token_ids) == expected[0, len(texts[0]) :].tolist()
    assert made.token_ids != hf_greedy("llama", texts[0], 50)
