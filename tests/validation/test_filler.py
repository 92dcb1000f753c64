"""Filler tokens: plain words, the same for the same request, EOS where an output is to end and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from wall_time_runs import EOS, greedy, run_to_the_end, vocabulary, wall_engine

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.outputs import Completion
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.structured_outputs import StructuredOutputs
from pagedserve.simulator.constant import ConstantCost
from pagedserve.traces.lengths import Fixed, LengthDist, Uniform
from pagedserve.validation.filler import Filler, check_filler_params, filler_words

MS = 1_000_000


class Pieces:
    """A vocabulary spelled out."""

    def __init__(self, *pieces: str, special: Sequence[int] = ()) -> None:
        self._pieces, self.special_ids = pieces, frozenset(special)

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id].encode()

    def vocabulary(self, eos: Sequence[int] = ()) -> Vocabulary:
        pieces = cast(TokenPieces, cast(Any, self))
        return Vocabulary(len(self._pieces), frozenset(eos), pieces, lambda text: [])


def outputs(
    prompts: Sequence[Sequence[int]],
    *params: SamplingParams,
    lengths: LengthDist | None = None,
    depth: int = 0,
) -> list[Completion]:
    """What becomes of the prompts, each with its own parameters or all with the same."""
    with wall_engine(ConstantCost(MS), lengths=lengths, depth=depth) as (engine, clock):
        each = params * len(prompts) if len(params) == 1 else params
        states = [s for p, own in zip(prompts, each, strict=True) for s in engine.submit(p, own)]
        run_to_the_end(engine, clock)
        assert not len(engine.runner.filler) > len(engine.runner._sequences)
    return [state.completion() for state in states]


def test_words_are_preferred_and_special_tokens_are_not_among_them() -> None:
    words = Pieces(" the", " fox", "fox", "</s>", " Fox", "1", " a", " quick", "<pad>", special=[8])
    assert sorted(filler_words(words.vocabulary([3]))) == [0, 1, 7]
    assert sorted(filler_words(Pieces("a", "\n", " ", "", "é", "<s>", "b", special=[5]).vocabulary())) == [
        0,
        6,
    ]
    with pytest.raises(ValueError, match="none of the 2 tokens is printable ASCII text"):
        filler_words(Pieces("\n", "</s>").vocabulary([1]))


def test_an_output_has_max_tokens_tokens_and_its_text_is_theirs() -> None:
    (one,) = outputs([[1, 2, 3]], greedy(40))
    assert (len(one.token_ids), one.finish_reason) == (40, "length")
    assert one.text == bytes(vocabulary().pieces.piece(token)[0] for token in one.token_ids).decode()
    assert EOS not in one.token_ids
    assert len(set(one.token_ids)) > 10


def test_a_seed_or_a_greedy_prompt_fixes_the_output_and_others_differ() -> None:
    random = {"temperature": 1.0}
    params = [greedy(20), greedy(20), greedy(20), greedy(20, seed=1, **random), greedy(20, seed=1, **random)]
    params += [greedy(20, seed=2, n=2, **random)]
    found = [c.token_ids for c in outputs([[1], [1], [2], [1], [2], [1]], *params)]
    assert found[0] == found[1] != found[2]
    assert found[3] == found[4]
    assert len({found[3], found[5], found[6]}) == 3
    assert found == [c.token_ids for c in outputs([[1], [1], [2], [1], [2], [1]], *params, depth=1)]


def test_stops_by_string_by_id_and_by_script_are_the_engines_own() -> None:
    (whole,) = outputs([[5]], greedy(30))
    text, token = whole.text, whole.token_ids[9]
    (by_text,) = outputs([[5]], greedy(30, stop=[text[10:13]]))
    assert (by_text.text, by_text.finish_reason, by_text.stop) == (text[:10], "stop", text[10:13])
    (by_id,) = outputs([[5]], greedy(30, stop_token_ids=[token]))
    assert (by_id.token_ids, by_id.finish_reason, by_id.stop) == (whole.token_ids[:10], "stop", token)
    (later,) = outputs([[5]], greedy(30, stop_token_ids=[token], min_tokens=12))
    assert token not in later.token_ids[:12]
    assert len(later.token_ids) > 12


@pytest.mark.parametrize("depth", [0, 1])
def test_drawn_lengths_end_outputs_with_eos_unless_it_is_ignored(depth: int) -> None:
    prompts, params = [[i] for i in range(200)], greedy(20, temperature=1.0)
    found = outputs(prompts, params, lengths=Uniform(1, 40), depth=depth)
    counts = Counter(c.finish_reason for c in found)
    assert set(counts) == {"stop", "length"}
    assert 60 < counts["stop"] < 140
    for completion in found:
        stopped = completion.finish_reason == "stop"
        assert (completion.token_ids[-1] == EOS) == stopped
        assert EOS not in completion.token_ids[:-1]
        assert stopped or len(completion.token_ids) == 20
    assert [c.token_ids for c in found] == [
        c.token_ids for c in outputs(prompts, params, lengths=Uniform(1, 40))
    ]
    (ignoring,) = outputs([[1]], greedy(20, ignore_eos=True), lengths=Fixed(3))
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (20, "length")
    (patient,) = outputs([[1]], greedy(20, min_tokens=7), lengths=Fixed(3))
    assert (len(patient.token_ids), patient.finish_reason) == (8, "stop")


def test_lengths_need_an_eos() -> None:
    with pytest.raises(ValueError, match="names no EOS token"):
        Filler(vocabulary(has_eos=False), Fixed(3))


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputs(json_object=True)},
        {"allowed_token_ids": [1]},
        {"logit_bias": {1: 5}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_a_distribution_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with wall_engine(ConstantCost(MS)) as (engine, _):
        with pytest.raises(
            ValueError, match=f"^{name}.* is set, but the simulated engine makes filler tokens"
        ):
            engine.submit([1], greedy(3, **options))
        assert not engine.has_work
    check_filler_params(SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=3, n=2))
