"""One HTTP request at work: its prompts to the engine, its deltas back, and all the ways in which it may end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from pagedserve.engine.engine import EngineDead
from pagedserve.engine.outputs import Delta
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.server.admission import Ticket
from pagedserve.engine.server.errors import ApiError, bad_request, engine_dead
from pagedserve.engine.server.front import FrontEnd
from pagedserve.engine.server.meter import PromptMeter
from pagedserve.engine.server.prompts import Encoded
from pagedserve.engine.server.sampling import Wanted, named

Encoder = Callable[[], Encoded]


@dataclass(frozen=True, slots=True)
class EndState:
    """The request is over before its sequences ended: the reader left, time ran out, the server goes down."""

    reason: str


@dataclass(slots=True)
class PromptState:
    """One prompt of the request, as it goes to the engine."""

    ids: list[int]
    text: str
    """What is repeated of it in the answer, mostly nothing."""
    params: SamplingParams
    meter: PromptMeter


Item = tuple[int, Delta] | EndState | Exception


class Generation:
    """Feeds a queue from the engine in a task of its own, so that whoever reads it can be told to stop.

    Use it as an async context manager around `deltas`. Leaving it ends whatever still runs.
    """

    def __init__(
        self, front: FrontEnd, wanted: Wanted, encoders: Sequence[Encoder], arrival_ns: int | None = None
    ) -> None:
        """``encoders`` give the token ids of the prompts; they run in the codec's threads."""
        self.prompts: list[PromptState] = []
        self.sending_since: float | None = None
        self.was_dropped = False
        self._front, self._wanted, self._encoders = front, wanted, encoders
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        self._meters = [PromptMeter(front.counts, arrival_ns, wanted.num_samples) for _ in encoders]
        self._ticket: Ticket | None = None
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._feeder: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended: str | None = None
        self._requests: set[int] = set()

    async def __aenter__(self) -> Generation:
        """Queue up; `ApiError` 503 if the queue is full, 400 if it never has room."""
        self._ticket = self._front.admission.enter(len(self._encoders) * self._wanted.num_samples)
        self._front.open.add(self)
        self._reader = asyncio.current_task()
        self._feeder = asyncio.create_task(self._feed())
        limit_s = self._front.settings.request_timeout_s
        if limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self.end, "timeout")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._feeder is not None
        assert self._ticket is not None
        self._front.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._feeder.cancel()
        with suppress(asyncio.CancelledError):
            await self._feeder
        self._ticket.leave()
        for meter in self._meters:
            meter.end(self._ended or "abort")

    def end(self, reason: str) -> None:
        """Stop the work now; `deltas` tells its reader. Only the first reason counts."""
        if self._ended is None and self._feeder is not None:
            self._ended = reason
            for request in self._requests:
                self._front.backend.abort(request, self._sequences_end())
            self._feeder.cancel()
            self._queue.put_nowait(EndState(reason))

    def _sequences_end(self) -> str:
        """The finish reason of sequences that have not ended by themselves."""
        return "timeout" if self._ended == "timeout" else "abort"

    def drop_if_stalled(self, limit_s: float) -> None:
        """End the connection if what was sent last has not been taken for so long."""
        since = self.sending_since
        if since is not None and time.monotonic() - since > limit_s and self._reader is not None:
            self.was_dropped, self.sending_since = True, None
            self.end("disconnect")
            self._reader.cancel(f"the reader took nothing for {limit_s:g} s")

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Index of prompt and delta, until all sequences have ended.

        When the server goes down, sequences that have begun end with the reason "abort". Raises `ApiError`: 400 and
        503 before the first delta, 504 when time ran out, 500 for what failed; `ReaderGone` if nobody listens.
        """
        open_sequences: set[tuple[int, int]] = {
            (prompt, sample)
            for prompt in range(len(self._encoders))
            for sample in range(self._wanted.num_samples)
        }
        has_begun = False
        while open_sequences:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise self._as_api_error(item)
            if isinstance(item, EndState):
                if item.reason != "abort" or not has_begun:
                    raise self._early_end(item.reason)
                for prompt, sample in sorted(open_sequences):
                    yield prompt, Delta(-1, sample, (), "", "abort")
                return
            prompt, delta = item
            if delta.finish_reason == "error" and delta.is_callers_error:
                raise bad_request(f"the output cannot go on: {delta.error}", code="nothing_allowed")
            if delta.finish_reason == "error":
                raise ApiError(500, f"the output failed: {delta.error}", code="output_failed")
            if delta.finish_reason is not None:
                open_sequences.discard((prompt, delta.index))
            elif not delta.token_ids and not delta.text:
                continue  # a token that could not be chosen; the end comes with the next
            has_begun = True
            yield item

    def _early_end(self, reason: str) -> Exception:
        if reason == "timeout":
            limit_s = self._front.settings.request_timeout_s
            return ApiError(
                504,
                f"the request did not end within {limit_s:g} s; ask for fewer tokens, or retry when less is queued",
                code="timeout",
            )
        if reason == "disconnect":
            return ReaderGone()
        return ApiError(503, "the server shut down before the request ran; retry later", code="shutting_down")

    def _as_api_error(self, error: Exception) -> Exception:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineDead):
            return engine_dead(500)
        if isinstance(error, ValueError):
            return named(error, self._wanted.form_name)
        return error

    async def _feed(self) -> None:
        try:
            await self._prepare()
            streams = [self._pump(index) for index in range(len(self.prompts))]
            if len(streams) == 1:
                await streams[0]
            else:
                async with asyncio.TaskGroup() as group:
                    for stream in streams:
                        group.create_task(stream)
        except Exception as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._ended = self._ended or "error"
            self._queue.put_nowait(first)

    async def _prepare(self) -> None:
        """Token ids of all prompts, and whether they can run and may queue; nothing has run before."""
        front, wanted = self._front, self._wanted
        assert self._ticket is not None
        encoded = [await front.codec.run(encoder) for encoder in self._encoders]
        params = [wanted.params(len(each.ids), front.backend.facts) for each in encoded]
        self._ticket.add_tokens(sum(len(each.ids) for each in encoded))
        self.prompts = [
            PromptState(each.ids, each.text, own, meter)
            for each, own, meter in zip(encoded, params, self._meters, strict=True)
        ]
        for own in params:
            await front.backend.check(own)
        for prompt in self.prompts:
            prompt.meter.accepted(len(prompt.ids), prompt.params.max_tokens)

    async def _pump(self, index: int) -> None:
        """Take one prompt's deltas as they come, whoever reads them."""
        prompt, put, ticket = self.prompts[index], self._queue.put_nowait, self._ticket
        assert ticket is not None
        options = self._wanted.options
        stream = self._front.backend.stream(prompt.ids, prompt.params, options, self._sequences_end)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._requests.add(delta.request)
                if prompt.meter.take(delta):
                    ticket.started(prompt.params.n, len(prompt.ids))
                put((index, delta))


class ReaderGone(Exception):
    """The client closed its connection; there is nobody to answer."""
