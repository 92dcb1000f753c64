"""What a caller gets: completions, whole or as they grow."""

from dataclasses import dataclass, field

from pagedserve.engine.runner import TokenEvent
from pagedserve.engine.sampling.logprobs import PositionLogprobs
from pagedserve.engine.sequences import SequenceState


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt.

    ``finish_reason``: "stop", "length", "abort", "timeout" or "error"; None while it grows. ``stop``: the
    stop string or token id that ended it, if one did. ``error`` says what went wrong, if anything.
    """

    request: int
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop: str | int | None
    logprobs: tuple[PositionLogprobs, ...] | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to a completion; the last one has a ``finish_reason``."""

    request: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class CompletionState:
    """A completion under construction."""

    sequence: SequenceState
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None
    error: str | None = None

    def take(self, event: TokenEvent) -> Delta:
        """Add a token; what ends the completion comes with `finish`."""
        if event.error is not None:
            self.error = str(event.error)
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        self.pieces.append(event.text)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        self.stop = event.stop
        return Delta(
            self.sequence.request.id,
            self.sequence.sample_index,
            () if event.token_id is None else (event.token_id,),
            event.text,
            logprobs=() if event.logprobs is None else (event.logprobs,),
        )

    def finish(self, reason: str) -> Delta:
        """End it: the rest of the text, and why."""
        tail = self.sequence.text.finish()
        self.pieces.append(tail)
        self.finish_reason = reason
        request, index = self.sequence.request.id, self.sequence.sample_index
        return Delta(request, index, (), tail, reason, self.stop, error=self.error)

    def completion(self) -> Completion:
        """The completion so far."""
        sequence = self.sequence
        return Completion(
            sequence.request.id,
            sequence.sample_index,
            tuple(sequence.token_ids[: sequence.request.num_prompt_tokens]),
            tuple(self.token_ids),
            "".join(self.pieces),
            self.finish_reason,
            self.stop,
            tuple(self.logprobs) if sequence.params.logprobs is not None else None,
            self.error,
        )
