"""What is refused, and that the refusal says the value, the limit and what to do (CASES S3, T3, H3)."""

import numpy as np
import pytest

from pagedserve.engine.params import SamplingParams, check_token_ids


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("temperature", -0.1, ["temperature", "-0.1", "[0.0, 100.0]", "0 for greedy"]),
        ("temperature", 101, ["101", "100.0"]),
        ("temperature", float("nan"), ["nan"]),
        ("temperature", float("inf"), ["inf"]),
        ("temperature", "hot", ["'hot'", "a number"]),
        ("temperature", True, ["True", "a number"]),
        ("top_p", 0.0, ["top_p", "(0.0, 1.0]", "1 to switch it off"]),
        ("top_p", 1.01, ["1.01"]),
        ("top_k", -2, ["top_k", "-2", "0 or -1"]),
        ("top_k", 1.5, ["1.5", "whole"]),
        ("min_p", -1e-9, ["min_p"]),
        ("n", 0, ["n is 0", "at least one sample"]),
        ("n", 10**9, ["1000000000", "16384"]),
        ("max_tokens", -5, ["max_tokens", "-5", "at least one token"]),
        ("max_tokens", 0, ["max_tokens is 0"]),
        ("max_tokens", 2**40, ["max_tokens"]),
        ("min_tokens", -1, ["min_tokens"]),
        ("min_tokens", 17, ["17", "max_tokens, 16"]),
        ("seed", 2**63, ["seed", "signed 64-bit"]),
        ("seed", 1.0, ["seed", "whole"]),
        ("logprobs", -1, ["logprobs", "leave it out"]),
        ("stop", "", ["stop[0]", "empty"]),
        ("stop", ["a", ""], ["stop[1]", "empty"]),
        ("stop", [3], ["stop[0]", "3", "stop_token_ids"]),
        ("stop_token_ids", ["a"], ["stop_token_ids[0]", "'a'"]),
        ("stop_token_ids", [True], ["stop_token_ids[0]", "True"]),
        ("ignore_eos", 1, ["ignore_eos", "True or False"]),
    ],
)
def test_refusals_name_value_limit_and_remedy(option, value, words):
    with pytest.raises(ValueError, match=option) as refusal:
        SamplingParams(**{option: value})
    for word in words:
        assert word in str(refusal.value)


def test_limits_themselves_are_allowed():
    params = SamplingParams(
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1.0,
        n=1,
        max_tokens=3,
        min_tokens=3,
        seed=-(2**63),
        logprobs=0,
    )
    assert params.is_greedy
    assert SamplingParams(temperature=100, top_p=1e-9, seed=2**63 - 1, n=16_384).temperature == 100


def test_numpy_scalars_are_numbers():
    params = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    assert params.top_k == 5


def test_one_stop_string_is_not_taken_letter_by_letter():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(1,)
    )


def test_greedy_is_temperature_zero_or_one_candidate():
    assert SamplingParams(temperature=0.0, top_k=40).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(temperature=0.7, top_k=1).is_greedy
    assert not SamplingParams(temperature=0.7, top_k=2).is_greedy


@pytest.mark.parametrize("token_id", [-1, 100, 2**31])
def test_ids_outside_the_vocabulary_are_named(token_id):
    params = SamplingParams(stop_token_ids=[99, token_id])
    with pytest.raises(ValueError, match=rf"stop_token_ids\[1\] is {token_id}; .* 0 to 99"):
        params.validate_for_vocab(100)
    with pytest.raises(ValueError, match=rf"prompt\[2\] is {token_id}"):
        check_token_ids("prompt", [0, 99, token_id], 100)


def test_more_logprobs_than_tokens_are_refused():
    SamplingParams(logprobs=100).validate_for_vocab(100)
    with pytest.raises(ValueError, match="logprobs is 101; the vocabulary has 100"):
        SamplingParams(logprobs=101).validate_for_vocab(100)
