"""From deltas to an answer: whole, or as server-sent events. What completions and chat share."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from pagedserve.engine.outputs import Delta, PromptLogprobs
from pagedserve.engine.sampling.logprobs import PositionLogprobs
from pagedserve.engine.server.errors import ApiError
from pagedserve.engine.server.generation import Generation
from pagedserve.engine.server.sampling import Wanted

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def as_json(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return _encode(content).encode()


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(content) + b"\n\n"


@dataclass(slots=True)
class ChoiceState:
    """One sequence of the answer, under construction."""

    index: int
    prompt: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop: str | int | None = None
    has_begun: bool = False

    def take(self, delta: Delta) -> None:
        """Add a delta."""
        self.pieces.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop


class Answer(ABC):
    """Tells the deltas of a `Generation` in one of the API's forms."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, generation: Generation, wanted: Wanted, model: str, request_id: str | None, num_prompts: int
    ) -> None:
        self.generation, self.wanted = generation, wanted
        self._head = {"id": f"{self.id_prefix}-{request_id or uuid4().hex}"}
        self._about = {"created": int(time.time()), "model": model}
        samples = wanted.num_samples
        self.choices = [ChoiceState(index, index // samples) for index in range(num_prompts * samples)]
        self._num_output_tokens = self._num_cached_tokens = 0

    @abstractmethod
    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """A choice that has ended, without index, finish reason and stop."""

    @abstractmethod
    def chunk_choice(self, choice: ChoiceState, delta: Delta) -> dict[str, Any]:
        """What a delta adds to a choice, likewise."""

    def whole_extra(self) -> dict[str, Any]:
        """What a whole answer says beside its choices."""
        return {}

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises what `Generation.deltas` raises, and 503 for an answer cut short."""
        async for choice, delta in self._choices():
            choice.take(delta)
            if delta.finish_reason == "abort":
                raise ApiError(
                    503,
                    "the request was ended before its answer was complete; retry later",
                    code="aborted",
                )
        if any(choice.prompt_logprobs for choice in self.choices):
            return await asyncio.to_thread(
                self._whole
            )  # thousands of positions: the event loop has others to serve
        return self._whole()

    def _whole(self) -> bytes:
        choices = [self._with_ending(each, self.whole_choice(each), each) for each in self.choices]
        return as_json(
            {
                **self._head,
                "object": self.whole_object,
                **self._about,
                "choices": choices,
                "usage": self._usage(),
                **self.whole_extra(),
            }
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, the last one ``[DONE]``; an answer cut short ends with the reason "abort"."""
        head = {**self._head, "object": self.chunk_object, **self._about}
        wanted = self.wanted
        async for choice, delta in self._choices():
            if delta.prompt_logprobs:
                content = await asyncio.to_thread(self.chunk_choice, choice, delta)
            else:
                content = self.chunk_choice(choice, delta)
            told = self._with_ending(choice, content, delta)
            choice.has_begun = True
            chunk: dict[str, Any] = {**head, "choices": [told]}
            if wanted.includes_usage:
                chunk["usage"] = self._usage() if wanted.includes_continuous_usage else None
            yield event(chunk)
        if wanted.includes_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    async def _choices(self) -> AsyncGenerator[tuple[ChoiceState, Delta], None]:
        samples = self.wanted.num_samples
        async with aclosing(self.generation.deltas()) as deltas:
            async for prompt, delta in deltas:
                if self.wanted.echoes_only:
                    delta = _silenced(delta)
                self._num_output_tokens += len(delta.token_ids)
                if delta.index == 0:  # a prompt counts once, whatever its n
                    self._num_cached_tokens += delta.num_cached_tokens
                yield self.choices[prompt * samples + delta.index], delta

    @staticmethod
    def _with_ending(
        choice: ChoiceState, content: dict[str, Any], ended: ChoiceState | Delta
    ) -> dict[str, Any]:
        ending = {"finish_reason": ended.finish_reason, "stop_reason": ended.stop}
        return {"index": choice.index, **content, **ending}

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens = sum(len(prompt.ids) for prompt in self.generation.prompts)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


def _silenced(delta: Delta) -> Delta:
    """The same without its output."""
    reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
    return replace(delta, token_ids=(), text="", logprobs=(), finish_reason=reason, stop=None)
