"""What a user may ask of the sampler, checked once at intake so that nothing later has to.

Names, defaults and meanings are vLLM's (https://docs.vllm.ai, `SamplingParams`) where it has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pagedserve.engine.structured_outputs import StructuredOutputs

# Below this temperature a row is greedy: vLLM's threshold. Nothing smaller reaches a division.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0
MAX_SAMPLES = 16_384
MAX_TOKENS = 2**31 - 1
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
SEED_RANGE = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The interval a numeric option must lie in, whether it is whole, and what to do instead."""

    low: float
    high: float
    advice: str
    whole: bool = True
    low_excluded: bool = False

    def check(self, name: str, value: object) -> None:
        kind, word = (Integral, "a whole number") if self.whole else (Real, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be {word}: {self.advice}")
        number: Any = value
        # Written so that NaN fails.
        if not self.low <= number <= self.high or (self.low_excluded and number == self.low):
            opening = "(" if self.low_excluded else "["
            interval = f"{opening}{self.low}, {self.high}]"
            raise ValueError(f"{name} is {value}; it must lie in {interval}: {self.advice}")


_LIMITS = {
    "temperature": _Limits(0.0, MAX_TEMPERATURE, "use 0 for greedy decoding", whole=False),
    "top_p": _Limits(0.0, 1.0, "use 1 to switch it off", whole=False, low_excluded=True),
    "top_k": _Limits(-1, MAX_TOKENS, "use 0 or -1 to switch it off"),
    "min_p": _Limits(0.0, 1.0, "use 0 to switch it off", whole=False),
    "repetition_penalty": _Limits(0.01, 100.0, "use 1 to switch it off", whole=False),
    "presence_penalty": _Limits(-MAX_PENALTY, MAX_PENALTY, "use 0 to switch it off", whole=False),
    "frequency_penalty": _Limits(-MAX_PENALTY, MAX_PENALTY, "use 0 to switch it off", whole=False),
    "n": _Limits(1, MAX_SAMPLES, "ask for at least one sample"),
    "max_tokens": _Limits(1, MAX_TOKENS, "ask for at least one token"),
    "min_tokens": _Limits(0, MAX_TOKENS, "use 0 to switch it off"),
}
_OPTIONAL_LIMITS = {
    "seed": _Limits(*SEED_RANGE, "give a signed 64-bit seed, or none to have one drawn"),
    "logprobs": _Limits(0, MAX_TOKENS, "leave it out for no logprobs; 0 gives the sampled token's alone"),
    "prompt_logprobs": _Limits(
        0, MAX_TOKENS, "leave it out for no logprobs; 0 gives the prompt tokens' alone"
    ),
}
_BIAS = _Limits(-MAX_BIAS, MAX_BIAS, "-100 keeps a token out and 100 all others", whole=False)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens, when to stop, and what to report.

    temperature: 0 (anything below 1e-5) is greedy: the largest logit, the lowest id on ties.
    top_k, top_p, min_p: filters, in `sampling.sampler`'s order; 0 or -1, 1 and 0 switch them off.
    seed: signed 64 bits; a seed fixes the output whatever else runs. None: the engine draws one at intake.
    n: independent samples of one prompt; sample i of a seed is reproducible.
    max_tokens: generated tokens at most, the one that stops included.
    min_tokens: generated tokens before any EOS, stop id or stop string may end the request.
    stop: strings that end the output, the earliest completed one; a single string is taken as one stop.
    stop_token_ids: ids that end the output, also under `ignore_eos`.
    repetition_penalty: above 1 makes tokens of the prompt and the output less likely; 1 switches it off.
    presence_penalty, frequency_penalty: taken off the logit of a token that is in the output, once and for each
        time; `sampling.penalties` has the formulas. 0 switches them off.
    logit_bias: by token id, what is added to its logit, -100 to 100; kept as pairs in the order of ids.
    allowed_token_ids: no others are chosen; None for all.
    structured_outputs: a form that the output must have; the output ends where its form does.
    logprobs: None, or report the sampled token's and the `logprobs` most likely tokens' of the model's own
        distribution (before temperature, filters and whatever else changes it, as vLLM's `raw_logprobs`).
    prompt_logprobs: the same for the prompt's tokens but the first. Such a request does not use the prefix cache.

    Raises ValueError with the value, the limit and what to do.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        for name, limits in _LIMITS.items():
            limits.check(name, getattr(self, name))
        for name, limits in _OPTIONAL_LIMITS.items():
            if getattr(self, name) is not None:
                limits.check(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._check_stops()
        self._check_form()

    def _check_form(self) -> None:
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids is empty, so that no token can be chosen: name some, or leave it out"
                )
            _check_whole("allowed_token_ids", self.allowed_token_ids)
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputs):
            raise ValueError(f"structured_outputs is {wanted!r}; give a StructuredOutputs, or None")
        if wanted is not None and self.min_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens} beside structured_outputs, whose form says where an output ends: "
                "leave one of them out"
            )

    def _check_stops(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}: "
                "lower the first or raise the other"
            )
        for index, text in enumerate(self.stop):
            if not isinstance(text, str):
                raise ValueError(
                    f"stop[{index}] is {text!r}; a stop must be a string: use stop_token_ids for ids"
                )
            if not text:
                raise ValueError(f"stop[{index}] is empty; it would end every output at once: leave it out")
        _check_whole("stop_token_ids", self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the largest logit and no noise is used; `top_k=1` is the same choice."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """Token ids, ascending, and what is added to their logits."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on what is in the sequence already."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Refuse what a model of `vocab_size` tokens cannot do; ValueError names the option and the id."""
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        for token_id, _ in self.bias_pairs:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"logit_bias has the id {token_id}; the model's ids are 0 to {vocab_size - 1}: correct it"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise ValueError(
                    f"{name} is {count}; the vocabulary has {vocab_size} tokens: ask for no more"
                )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside [0, vocab_size) in a prompt or an option, `name`; ValueError names the first."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name}[{index}] is {token_id}; the model's ids are 0 to {vocab_size - 1}: correct it"
            )


def _check_whole(name: str, token_ids: Sequence[Any]) -> None:
    for index, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise ValueError(f"{name}[{index}] is {token_id!r}; it must be a whole number")


def _bias_pairs(
    bias: Mapping[Any, Any] | tuple[tuple[Any, Any], ...],
) -> tuple[tuple[int, float], ...]:
    """In the order of ids; a JSON object's keys, which are text, are taken as the numbers they show."""
    pairs: dict[int, float] = {}
    for key, value in dict(bias).items():
        is_whole = isinstance(key, Integral) and not isinstance(key, bool)
        if not is_whole and not (
            isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        ):
            raise ValueError(f"logit_bias has the key {key!r}; keys are token ids, whole numbers")
        _BIAS.check(f"logit_bias[{int(key)}]", value)
        pairs[int(key)] = float(value)
    return tuple(sorted(pairs.items()))
