"""The front end of one server: its parts, the requests that are open, and whether it still takes new ones."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from pagedserve.engine.server.admission import RETRY_AFTER_S, Admission
from pagedserve.engine.server.backend import EngineBackend
from pagedserve.engine.server.errors import ApiError, engine_dead, shown
from pagedserve.engine.server.meter import FrontCountsState
from pagedserve.engine.server.prompts import PromptCodec
from pagedserve.engine.server.settings import ServerSettings

if TYPE_CHECKING:
    from pagedserve.engine.server.generation import Generation


class FrontEnd:
    """Shared by all routes of an app; lives in the event loop's thread."""

    def __init__(self, backend: EngineBackend, codec: PromptCodec, settings: ServerSettings) -> None:
        self.backend, self.codec, self.settings = backend, codec, settings
        self.admission = Admission(settings)
        self.counts = FrontCountsState()
        self.created = int(time.time())
        self.open: set[Generation] = set()
        self._drained_by: float | None = None

    @property
    def closed_by(self) -> ApiError | None:
        """Why no new requests are taken: the server drains, or its engine has stopped; None: they are."""
        if self.backend.fault is not None:
            return engine_dead(503)
        if self._drained_by is None:
            return None
        left_s = math.ceil(self._drained_by - time.monotonic())
        return ApiError(
            503,
            "the server is shutting down and takes no new requests; send it to another, or retry later",
            code="shutting_down",
            retry_after_s=max(RETRY_AFTER_S, left_s),
        )

    def check_open(self) -> None:
        """Raise `closed_by`, and count the request that it turns away."""
        error = self.closed_by
        if error is not None:
            self.admission.rejections[str(error.code)] += 1
            raise error

    def check_model(self, name: str | None) -> str:
        """The served name that a request means; `ApiError` 404 for one that is not served."""
        names = self.settings.model_names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {shown(name)} is not served here; ask for {' or '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; wait for the open ones, and end those that are left after ``timeout_s``.

        Returns when all have been answered, or a little after their ends were asked for. Being called again
        brings the end of the wait forward.
        """
        by = time.monotonic() + timeout_s
        self._drained_by = by if self._drained_by is None else min(by, self._drained_by)
        while self.open and time.monotonic() < self._drained_by and self.backend.fault is None:
            await asyncio.sleep(0.02)
        for generation in list(self.open):
            generation.end("abort")
        await self.answered(timeout_s=5.0)

    async def answered(self, timeout_s: float) -> None:
        """Wait until no request is open, at most ``timeout_s``."""
        by = time.monotonic() + timeout_s
        while self.open and time.monotonic() < by:
            await asyncio.sleep(0.01)

    async def watch_readers(self) -> None:
        """Drop, for ever, connections whose readers take nothing for ``send_timeout_s``."""
        limit_s = self.settings.send_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            for generation in list(self.open):
                generation.drop_if_stalled(limit_s)
