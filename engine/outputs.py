"""What a caller gets: completions, whole or as they grow."""

from dataclasses import dataclass, field

from pagedserve.engine.sampling.logprobs import PositionLogprobs
from pagedserve.engine.sampling.sampler import NothingAllowed
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.token_events import TokenEvent
from pagedserve.policy import RequestState

PromptLogprobs = tuple[PositionLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt.

    ``finish_reason``: "stop", "length", "abort", "timeout" or "error"; None while it grows. ``stop``: the
    stop string or token id that ended it, if one did. ``error`` says what went wrong, if anything.
    ``prompt_logprobs``, if they were asked for and the prompt was computed: one for each prompt token, None for
    the first. ``num_cached_tokens``: prompt tokens found in the prefix cache.
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
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to a completion; the last one has a ``finish_reason``.

    ``time_ns``: when the step was committed, on the engine's clock; None where no step made it. The delta with
    the first token has the ``prompt_logprobs``, if they were asked for, and ``num_cached_tokens``.
    """

    request: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    error: str | None = None
    is_callers_error: bool = False
    """What failed is what the request asked for, not the model."""
    time_ns: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class CompletionState:
    """A completion under construction."""

    sequence: SequenceState
    progress: RequestState | None = None
    """The scheduler's side of it, once it is there."""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None
    error: str | None = None
    is_callers_error: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    def take(self, event: TokenEvent, time_ns: int) -> Delta:
        """Add a token; what ends the completion comes with `finish`."""
        is_first = not self.token_ids and event.token_id is not None
        if event.error is not None:
            self.error = str(event.error)
            self.is_callers_error = isinstance(event.error, NothingAllowed)
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        self.pieces.append(event.text)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        self.stop = event.stop
        if is_first:
            self.num_cached_tokens = 0 if self.progress is None else self.progress.num_prefix_hit_tokens
            if self.sequence.params.prompt_logprobs is not None:
                self.prompt_logprobs = (None, *self.sequence.prompt_logprobs)
        return Delta(
            self.sequence.request.id,
            self.sequence.sample_index,
            () if event.token_id is None else (event.token_id,),
            event.text,
            logprobs=() if event.logprobs is None else (event.logprobs,),
            time_ns=time_ns,
            prompt_logprobs=self.prompt_logprobs if is_first else None,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
        )

    def finish(self, reason: str, time_ns: int) -> Delta:
        """End it: the rest of the text, and why."""
        tail = self.sequence.text.finish()
        self.pieces.append(tail)
        self.finish_reason = reason
        request, index = self.sequence.request.id, self.sequence.sample_index
        return Delta(
            request,
            index,
            (),
            tail,
            reason,
            self.stop,
            error=self.error,
            is_callers_error=self.is_callers_error,
            time_ns=time_ns,
        )

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
            self.prompt_logprobs,
            self.num_cached_tokens,
        )
