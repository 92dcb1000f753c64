"""The live page's feed: looks at the engine while somebody listens, and tells all listeners the same."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

import pagedserve
from pagedserve.engine.server.engine_view import EngineView, SequenceView
from pagedserve.engine.server.errors import ApiError
from pagedserve.engine.server.front import FrontEnd
from pagedserve.engine.server.pulse import PulseState

logger = logging.getLogger(__name__)
MAX_LISTENERS = 16
RETRY_AFTER_S = 10
BUSY_S, IDLE_S = 0.25, 1.0
"""Between two looks, while sequences are there and while none is."""
BEAT_S = 2.0
"""A listener that was told nothing for so long, because a step is long, is told that the server lives."""
BEAT = b": still here\n\n"
MOST_RUNNING = 256


class FrameState:
    """What one look told; encoded once, however many listen."""

    def __init__(self, number: int, told: dict[str, Any], blocks: np.ndarray, before: np.ndarray) -> None:
        self.number, self.blocks = number, blocks
        self._told, self._before = _compact(told), before
        self._whole: bytes | None = None
        self._change: bytes | None = None

    def event(self, seen: int | None) -> bytes:
        """For a listener whose last frame was ``seen``: what changed in the pool since the one before, or all."""
        if seen == self.number - 1:
            self._change = self._change or self._event({"changed": changes(self._before, self.blocks)})
            return self._change
        self._whole = self._whole or self._event({"all": runs(self.blocks)})
        return self._whole

    def _event(self, blocks: dict[str, list[int]]) -> bytes:
        return f'event: frame\ndata: {self._told[:-1]},"blocks":{_compact(blocks)}}}\n\n'.encode()


class LiveFeed:
    """One for a server. Nothing happens without listeners; all methods belong to the event loop's thread.

    A listener that reads slowly misses frames: none is ever kept for it but the newest, which all share.
    """

    def __init__(self, front: FrontEnd) -> None:
        self.num_listeners = 0
        self._front = front
        self._pulse = PulseState()
        self._epoch_ns = time.monotonic_ns()
        self._frame: FrameState | None = None
        self._fresh = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._is_closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, until `close` or a look that fails.

        Raises `ApiError` 503 before the first if there are listeners enough.
        """
        ticker = self._join()
        try:
            yield self._hello()
            seen: int | None = None
            while not self._is_closed and self._ticker is ticker:
                fresh, frame = self._fresh, self._frame
                if frame is not None and frame.number != seen:
                    yield frame.event(seen)
                    seen = frame.number
                    continue
                try:
                    # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with the event.
                    async with asyncio.timeout(BEAT_S):
                        await fresh.wait()
                except TimeoutError:
                    yield BEAT
        finally:
            self._leave()

    def close(self) -> None:
        """End all listeners; there will be no others."""
        self._is_closed = True
        self._wake()

    def _join(self) -> asyncio.Task[None]:
        if self._is_closed:
            raise ApiError(
                503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S
            )
        if self.num_listeners >= MAX_LISTENERS:
            told = f"{self.num_listeners} pages are watching and {MAX_LISTENERS} is the most; close one, or retry"
            raise ApiError(503, told, code="too_many_listeners", retry_after_s=RETRY_AFTER_S)
        self.num_listeners += 1
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._look_on())
        return self._ticker

    def _leave(self) -> None:
        self.num_listeners -= 1
        if not self.num_listeners and self._ticker is not None:
            self._ticker.cancel()
            self._rest()

    def _rest(self) -> None:
        """Look no more, until somebody joins."""
        self._ticker = self._frame = None
        self._pulse.pause()
        self._wake()

    def _wake(self) -> None:
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    async def _look_on(self) -> None:
        number, blocks = 0, np.empty(0, dtype=np.int64)
        try:
            while True:
                view = await self._front.backend.view()
                self._frame = FrameState(number, self._told(view), view.blocks, blocks)
                self._wake()
                number, blocks = number + 1, view.blocks
                await asyncio.sleep(BUSY_S if view.running or view.num_waiting else IDLE_S)
        except Exception as error:
            logger.error("the live page's look at the engine failed", exc_info=error)
            self._rest()

    def _hello(self) -> bytes:
        front, facts = self._front, self._front.backend.facts
        limits = facts.limits
        told = {
            "version": pagedserve.__version__,
            "model": front.settings.model_names[0],
            "policy": facts.policy,
            "parts": facts.policy_parts,
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "max_num_queued_reqs": front.settings.max_num_queued_reqs,
            "uptime_s": max(0, int(time.time()) - front.created),
            "points": list(self._pulse.history),
        }
        return f"event: hello\ndata: {_compact(told)}\n\n".encode()

    def _told(self, view: EngineView) -> dict[str, Any]:
        """A frame without its blocks. Numbers and tenants only: no text, no token of any request."""
        front, pool = self._front, view.pool
        at_s = (view.taken_ns - self._epoch_ns) / 1e9
        block_size = front.backend.facts.limits.block_size
        return {
            "state": "serving" if front.closed_by is None else front.closed_by.code,
            "point": self._pulse.add(view, at_s, block_size, front.counts.recent_ttft),
            "pool": [pool.owned, pool.shared, pool.quarantined, pool.cached, pool.free],
            "running": [_row(each, view.taken_ns) for each in view.running[:MOST_RUNNING]],
            "waiting": [_row(each, view.taken_ns) for each in view.waiting],
            "totals": view.totals,
            "ended": dict(front.counts.ended),
            "turned_away": front.admission.rejections.total(),
        }


def _row(view: SequenceView, now_ns: int) -> list[Any]:
    """A sequence as the page reads it, see ``sequences.js``."""
    return [
        view.id,
        view.phase,
        view.tenant,
        round((now_ns - view.arrival_ns) / 1e9, 1),
        view.num_prompt_tokens,
        view.num_computed_tokens,
        view.num_output_tokens,
        view.max_output_tokens,
        view.num_blocks,
        view.num_prefix_hit_tokens,
        view.num_preemptions,
    ]


def runs(codes: np.ndarray) -> list[int]:
    """Codes of a pool as (code, length), one pair behind another."""
    starts = np.flatnonzero(np.diff(codes, prepend=codes[0] - 1))
    lengths = np.diff(starts, append=len(codes))
    return np.stack([codes[starts], lengths], axis=1).ravel().tolist()


def changes(before: np.ndarray, after: np.ndarray) -> list[int]:
    """What makes ``after`` of ``before``, as (first block, length, code), one behind another."""
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return []
    codes = after[changed]
    starts = np.flatnonzero((np.diff(changed, prepend=-2) != 1) | (np.diff(codes, prepend=-1) != 0))
    lengths = np.diff(starts, append=len(changed))
    return np.stack([changed[starts], lengths, codes[starts]], axis=1).ravel().tolist()


def _compact(told: Any) -> str:
    return json.dumps(told, separators=(",", ":"))
