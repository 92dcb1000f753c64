"""When an output is complete: by a token id, or by a string in its text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagedserve.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenStops:
    """The ids that end one request, and those that `min_tokens` keeps from being chosen meanwhile."""

    stop_ids: frozenset[int]
    suppressed_ids: tuple[int, ...]
    min_tokens: int

    @classmethod
    def for_request(cls, params: SamplingParams, eos_token_ids: Iterable[int]) -> "TokenStops":
        """eos_token_ids: all of the model's, the generation config's included.

        `ignore_eos` ignores every one of them, save an id that the user also gave as a stop id.
        """
        eos = frozenset(eos_token_ids)
        chosen = frozenset(params.stop_token_ids)
        return cls(
            stop_ids=chosen if params.ignore_eos else chosen | eos,
            suppressed_ids=tuple(sorted(chosen | eos)) if params.min_tokens else (),
            min_tokens=params.min_tokens,
        )

    def ends_at(self, token_id: int, num_output_tokens: int) -> bool:
        """Whether token_id, as output token number num_output_tokens (from 1), ends the request.

        As in vLLM, min_tokens counts tokens before the one that stops.
        """
        return token_id in self.stop_ids and num_output_tokens > self.min_tokens


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to send now, and the stop string that ended the output with it, if one did."""

    text: str
    stop: str | None = None


class _PatternState:
    """How much of one stop string the text's end matches (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_failures", "num_matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._failures = _failure_lengths(pattern)

    def advance(self, char: str) -> bool:
        """Take one more character; True if it completes the pattern."""
        matched = self.num_matched
        while matched and self.pattern[matched] != char:
            matched = self._failures[matched]
        if self.pattern[matched] == char:
            matched += 1
        is_complete = matched == len(self.pattern)
        # A completed match that is not acted upon lives on as the longest prefix it ends with.
        self.num_matched = self._failures[matched] if is_complete else matched
        return is_complete


class StopMatcherState:
    """Finds stop strings in text that comes in pieces, and holds back only what could still become one.

    The stop completed first wins; of several completed by the same character, the first in the list. Held
    text is always the longest tail that is a proper prefix of some stop, so text without such a tail passes
    at once.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_PatternState(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> TextDelta:
        """Take more text; may_stop False lets a stop completed in it pass as ordinary text (min_tokens).

        After a stop nothing more may be pushed; text behind it is dropped.
        """
        assert not self._stopped, "text after the stop string"
        if not self._patterns:
            return TextDelta(text)
        for index, char in enumerate(text):
            complete = [pattern.pattern for pattern in self._patterns if pattern.advance(char)]
            if complete and may_stop:
                return self._cut(self._held + text[: index + 1], complete[0])
        text = self._held + text
        num_sent = len(text) - max(pattern.num_matched for pattern in self._patterns)
        self._held = text[num_sent:]
        return TextDelta(text[:num_sent])

    def finish(self) -> str:
        """The text still held, for an output that ended otherwise; empty after a stop or when asked again."""
        text, self._held = self._held, ""
        return text

    def _cut(self, text: str, stop: str) -> TextDelta:
        self._stopped = True
        self._held = ""
        return TextDelta(text if self._include_stop else text[: -len(stop)], stop)


def _failure_lengths(pattern: str) -> list[int]:
    """For n = 0 .. len(pattern): the longest proper prefix that the pattern's first n characters end with."""
    lengths = [0, 0]
    for end in range(1, len(pattern)):
        length = lengths[end]
        while length and pattern[length] != pattern[end]:
            length = lengths[length]
        lengths.append(length + 1 if pattern[length] == pattern[end] else 0)
    return lengths
