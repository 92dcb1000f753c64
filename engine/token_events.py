"""What a step brought, in the words of the engine and of the scheduler; the same for every runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagedserve.engine.keys import PrefixKeys
from pagedserve.engine.sampling.logprobs import PositionLogprobs
from pagedserve.engine.sequences import SequenceState
from pagedserve.policy import Outcome, StepPlan


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of one request: the text it completes, and why the request stops with it, if it does.

    ``error`` is set instead of a token when no token could be chosen; only this request ends.
    """

    request: int
    token_id: int | None
    text: str
    stop_reason: str | None
    stop: str | int | None = None
    logprobs: PositionLogprobs | None = None
    error: Exception | None = None


def token_event(
    sequence: SequenceState, token_id: int, logprobs: PositionLogprobs | None = None
) -> TokenEvent:
    """What the newest token of a sequence means: its text, and whether it stops by id, string, grammar or script."""
    count = sequence.num_output_tokens
    by_id = sequence.stops.ends_at(token_id, count)
    delta = sequence.text.push(token_id, is_stop_token=by_id)
    scripted = sequence.stop_after is not None and count >= sequence.stop_after
    stop = delta.stop if delta.stop is not None else token_id if by_id else None
    completed = sequence.grammar is not None and sequence.grammar.accept(token_id)
    ended = by_id or scripted or completed or delta.stop is not None
    sequence.ended = ended
    return TokenEvent(sequence.request.id, token_id, delta.text, "stop" if ended else None, stop, logprobs)


def filled_keys(
    plan: StepPlan, sequences: Mapping[int, SequenceState], keys: PrefixKeys | None
) -> dict[int, tuple[bytes, ...]]:
    """Keys of the blocks that the step filled and the scheduler has none for, by request."""
    found: dict[int, tuple[bytes, ...]] = {}
    for request, index in plan.filled:
        sequence = sequences[request]
        assert keys is not None
        keys.extend(sequence.block_keys, sequence.key_root, sequence.token_ids, index + 1)
        found[request] = (*found.get(request, ()), sequence.block_keys[index])
    return found


def outcomes_of(
    sampled: Iterable[int], events: Sequence[TokenEvent], keys: Mapping[int, tuple[bytes, ...]]
) -> list[Outcome]:
    """What the scheduler has to hear beyond one more token for every request that was ``sampled``."""
    stops = {event.request: event.stop_reason for event in events if event.stop_reason is not None}
    failed = {event.request for event in events if event.error is not None}
    with_token = set(sampled if keys else stops) - failed
    return [
        Outcome(request, int(request in with_token), stops.get(request), keys.get(request, ()))
        for request in {**stops, **keys}
    ]
