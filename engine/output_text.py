"""A request's visible text: detokenised, cut at a stop, and never sent and then taken back."""

from collections.abc import Sequence

from pagedserve.engine.detokenize import DetokenizerState, TokenPieces
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.stops import StopMatcherState, TextDelta


class OutputTextState:
    """Turns one request's tokens into the pieces of text to send, whose concatenation is the final text."""

    def __init__(
        self, params: SamplingParams, pieces: TokenPieces, *, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._detokenizer = DetokenizerState(
            pieces, prompt_ids=prompt_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher = StopMatcherState(params.stop, include_stop=params.include_stop_str_in_output)
        self._shows_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stop: str | None = None
        self.num_tokens = 0

    def push(self, token_id: int, *, is_stop_token: bool = False) -> TextDelta:
        """Take the next output token. A delta with a stop ends the request with this token: push no more.

        is_stop_token: the token ends the request by its id (`TokenStops.ends_at`); its text shows only under
        `include_stop_str_in_output`, as in vLLM.
        """
        self.num_tokens += 1
        if is_stop_token and not self._shows_stop_token:
            return TextDelta("")
        return self._match(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest of the text once the request ended, whatever the cause; empty after a stop string."""
        if self._stop is not None:
            return ""
        tail = self._match(self._detokenizer.finish())
        return tail.text + self._matcher.finish()

    def _match(self, text: str) -> TextDelta:
        # min_tokens counts the tokens before the one that completes the stop, as for stop ids.
        delta = self._matcher.push(text, may_stop=self.num_tokens > self._min_tokens)
        self._stop = delta.stop
        return delta
