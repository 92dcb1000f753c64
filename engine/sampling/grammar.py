"""Grammars that an output must follow: which tokens may come next. The parsing is llguidance's
(https://github.com/guidance-ai/llguidance), on the bytes that our own detokeniser knows tokens by.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of JSON: room to indent, but an end to it, or a model may pad for ever.
JSON_WHITESPACE = r"\n?[ ]{0,16}"
MAX_CACHED = 64
QUIET = 0
WORD_BITS = 32


class GrammarError(ValueError):
    """A grammar, schema or pattern that is none, or that is too complex."""


def num_words(vocab_size: int) -> int:
    """32-bit words of a mask with one bit for each token."""
    return -(-vocab_size // WORD_BITS)


class GrammarState:
    """How far one output has come in its grammar."""

    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._num_words = matcher, num_words(vocab_size)

    def copy(self) -> GrammarState:
        """One of its own for another output."""
        made = GrammarState.__new__(GrammarState)
        made._matcher, made._num_words = self._matcher.deep_copy(), self._num_words
        return made

    def fill(self, words: np.ndarray) -> str | None:
        """Write the tokens that may come next into ``words``, int32 [W]: bit i of word w is token 32 w + i.

        Returns what went wrong, after which no token may come.
        """
        assert words.dtype == np.int32
        assert words.shape == (self._num_words,)
        assert words.flags.c_contiguous
        words[:] = 0
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0
            return _first_line(self._matcher.get_error())
        return None

    def allows_any(self, token_ids: Iterable[int]) -> bool:
        """Whether one of these tokens may come next."""
        words = np.zeros(self._num_words, dtype=np.int32)
        self.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bool(bits[list(token_ids)].any())

    def accept(self, token_id: int) -> bool:
        """Take the token that came; True if the output ends with it."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()


class GrammarCompiler:
    """Grammars for one vocabulary; from any thread. What was compiled lately is kept."""

    def __init__(self, size: int, eos_token_ids: Iterable[int], pieces: TokenPieces) -> None:
        self._size, self._eos, self._pieces = size, sorted(eos_token_ids), pieces
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[StructuredOutputs, GrammarState] = {}

    def compile(self, wanted: StructuredOutputs) -> GrammarState:
        """The beginning of an output of that form. `GrammarError` says what is wrong with it."""
        with self._lock:
            found = self._compiled.pop(wanted, None)
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        if found is None:
            found = self._compile(wanted, self._tokenizer)
        with self._lock:
            self._compiled[wanted] = found  # the last one is the latest
            if len(self._compiled) > MAX_CACHED:
                del self._compiled[next(iter(self._compiled))]
        return found.copy()

    def _compile(self, wanted: StructuredOutputs, tokenizer: LLTokenizer) -> GrammarState:
        from llguidance import LLMatcher, LLParserLimits

        name, text = _grammar(wanted)
        # Wide schemas have many rules alive at a time; at about 20,000 items a millisecond this is still quick.
        limits = LLParserLimits(verbose_errors=False, max_items_in_row=10_000, step_max_items=100_000)
        matcher = LLMatcher(tokenizer, text, log_level=QUIET, limits=limits)
        if matcher.is_error():
            raise GrammarError(
                f"structured_outputs.{name} cannot be used: {_first_line(matcher.get_error())}"
            )
        found = GrammarState(matcher, self._size)
        words = np.zeros(num_words(self._size), dtype=np.int32)
        if found.fill(words) is not None or not words.any():
            raise GrammarError(f"structured_outputs.{name} cannot be used: no output has this form")
        return found

    def _make_tokenizer(self) -> LLTokenizer:
        if not self._eos:
            raise GrammarError(
                "structured_outputs need a model with an end-of-text token, and this one has none: leave them out"
            )
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapped = TokenizerWrapper(_Tokens(self._size, self._eos[0], self._pieces))
        return LLTokenizer(wrapped, n_vocab=self._size, eos_token=self._eos)


class _Tokens:
    """A tokenizer as llguidance asks for one."""

    bos_token_id = None

    def __init__(self, size: int, eos: int, pieces: TokenPieces) -> None:
        self.eos_token_id = eos
        self.tokens = [pieces.piece(token_id) for token_id in range(size)]
        self.special_token_ids = sorted(pieces.special_ids)
        self._pieces = pieces

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts only")  # what llguidance asks for bytes, to learn whether they are taken
        return self._pieces.encode(text)


def _grammar(wanted: StructuredOutputs) -> tuple[str, str]:
    """The field that asks, and its grammar as llguidance has it."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.json is not None or wanted.json_object:
            schema = wanted.json if isinstance(wanted.json, str) else '{"type": "object"}'
            options = {"whitespace_pattern": JSON_WHITESPACE, "coerce_one_of": True}
            return "json", LLMatcher.grammar_from_json_schema(schema, overrides=options)  # pyright: ignore
        if wanted.choice:
            return "choice", grammar_from("choice", json.dumps(wanted.choice))
        if wanted.regex is not None:
            return "regex", LLMatcher.grammar_from_regex(wanted.regex)
        assert wanted.grammar is not None
        return "grammar", grammar_from("grammar", wanted.grammar)
    except ValueError as error:
        raise GrammarError(f"structured_outputs cannot be used: {_first_line(str(error))}") from error


def _first_line(error: str) -> str:
    """Of a long report, what is wrong."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = next(
        (line for line in lines if line.startswith("error:")), lines[0] if lines else "no reason given"
    )
    return said.removeprefix("error: ")[:300]
