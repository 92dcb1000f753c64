"""Tokens for an engine that computes none: plain words of the vocabulary, the same for the same request."""

from __future__ import annotations

import random
import re
import zlib
from typing import TYPE_CHECKING

import numpy as np

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sequences import SequenceState
from pagedserve.traces.lengths import LengthDist

if TYPE_CHECKING:
    from pagedserve.engine.intake import Vocabulary

WORD = re.compile(" [a-z]{2,12}")
# What a sampler does with a model's distribution, and the value that asks for nothing.
NEEDS_DISTRIBUTION = {
    "logprobs": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "allowed_token_ids": None,
    "logit_bias": (),
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def check_filler_params(params: SamplingParams) -> None:
    """Raise ValueError for a parameter that only tokens chosen from a distribution could follow."""
    for name, neutral in NEEDS_DISTRIBUTION.items():
        if getattr(params, name) != neutral:
            said = f"{name} (or response_format, or guided_*)" if name == "structured_outputs" else name
            raise ValueError(
                f"{said} is set, but the simulated engine makes filler tokens, which come from no distribution: "
                "leave it out"
            )


class Filler:
    """Gives every sequence its tokens.

    They walk through the vocabulary's words in a fixed order from a start of the sequence's own: drawn from
    its seed and sample index, for a greedy one from its prompt. Neither special tokens nor, before the output's
    drawn length, EOS are among them. With ``lengths`` an output that does not ignore EOS gets it as its token of
    that number, drawn from the seed likewise, and later if its min_tokens says so.
    """

    def __init__(self, vocabulary: Vocabulary, lengths: LengthDist | None = None) -> None:
        """Raises ValueError for a vocabulary without any text, and for lengths where no EOS is known."""
        if lengths is not None and not vocabulary.eos_token_ids:
            raise ValueError(
                "output lengths are drawn, but the model names no EOS token to end them with: leave the lengths out"
            )
        self._words = filler_words(vocabulary)
        self._lengths = lengths
        self._eos = min(vocabulary.eos_token_ids, default=None)
        self._plans: dict[int, tuple[int, int | None]] = {}

    def expect(self, sequence: SequenceState) -> None:
        """Draw a sequence's start and length."""
        self._plans[sequence.request.id] = (self._start(sequence), self._length(sequence))

    def forget(self, request: int) -> None:
        """No more tokens are wanted."""
        self._plans.pop(request, None)

    def __len__(self) -> int:
        """Sequences that are expected."""
        return len(self._plans)

    def next_token(self, sequence: SequenceState) -> int:
        """The token behind those that the sequence has."""
        number = sequence.num_output_tokens + 1
        start, length = self._plans[sequence.request.id]
        if number == length:
            assert self._eos is not None
            return self._eos
        place, suppressed = start + number, ()
        if number <= sequence.stops.min_tokens:
            suppressed = sequence.stops.suppressed_ids
        for _ in self._words:
            token = self._words[place % len(self._words)]
            if token not in suppressed:
                return token
            place += 1
        return self._words[start]  # every word is suppressed: no other is better

    def _start(self, sequence: SequenceState) -> int:
        if sequence.params.is_greedy:
            prompt = sequence.token_ids[: sequence.request.num_prompt_tokens]
            return zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes()) % len(self._words)
        return random.Random(_draw_seed(sequence, "start")).randrange(len(self._words))

    def _length(self, sequence: SequenceState) -> int | None:
        if self._lengths is None or sequence.params.ignore_eos:
            return None
        rng = np.random.default_rng(random.Random(_draw_seed(sequence, "length")).getrandbits(64))
        return max(int(self._lengths.sample(rng, 1)[0]), sequence.stops.min_tokens + 1)


def _draw_seed(sequence: SequenceState, what: str) -> str:
    return f"{what} {sequence.seed} {sequence.sample_index}"


def filler_words(vocabulary: Vocabulary) -> list[int]:
    """Ids of tokens that are short words; where there are none, printable ASCII; all in one shuffled order."""
    skipped = vocabulary.pieces.special_ids | vocabulary.eos_token_ids
    texts = {
        token_id: vocabulary.pieces.piece(token_id).decode("utf-8", "replace")
        for token_id in range(vocabulary.size)
        if token_id not in skipped
    }
    kinds = (
        lambda text: WORD.fullmatch(text) is not None,
        lambda text: text.isascii() and text.isprintable() and not text.isspace() and bool(text),
    )
    for fits in kinds:
        words = [token_id for token_id, text in texts.items() if fits(text)]
        if words:
            random.Random(0).shuffle(words)
            return words
    raise ValueError(f"none of the {vocabulary.size} tokens is printable ASCII text: use another tokenizer")
