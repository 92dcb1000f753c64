"""A bounded queue: who is let in, counted from acceptance to the first token."""

from __future__ import annotations

from collections import Counter

from pagedserve.engine.server.errors import ApiError, bad_request
from pagedserve.engine.server.settings import ServerSettings

RETRY_AFTER_S = 1


class Admission:
    """How many sequences and prompt tokens are queued: accepted, and without a first token.

    Both bounds let a request in when nothing is queued, however large it is.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.num_reqs = self.num_tokens = 0
        self.rejections: Counter[str] = Counter()

    def enter(self, num_reqs: int) -> Ticket:
        """A place for ``num_reqs`` sequences; `ApiError` 503 if there is none now, 400 if there never is."""
        most = self._settings.max_num_queued_reqs
        if num_reqs > most:
            raise bad_request(
                f"the request asks for {num_reqs} outputs (prompts times n) and the queue has places for "
                f"{most}; send it in parts",
                "n",
            )
        if self.num_reqs + num_reqs > most:
            self.rejections["queue_full_reqs"] += 1
            raise ApiError(
                503,
                f"{self.num_reqs} requests are queued and max_num_queued_reqs is {most}; retry later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        return Ticket(self, num_reqs)

    def check_tokens(self, num_tokens: int) -> None:
        """`ApiError` 503 if so many more prompt tokens do not fit the queue now."""
        most = self._settings.max_num_queued_tokens
        if most is not None and self.num_tokens and self.num_tokens + num_tokens > most:
            self.rejections["queue_full_tokens"] += 1
            raise ApiError(
                503,
                f"{self.num_tokens} prompt tokens are queued, this request has {num_tokens} and "
                f"max_num_queued_tokens is {most}; retry later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )


class Ticket:
    """One HTTP request's places in the queue; given back bit by bit, and wholly by `leave`."""

    def __init__(self, admission: Admission, num_reqs: int) -> None:
        self._admission = admission
        self._num_reqs, self._num_tokens = num_reqs, 0
        admission.num_reqs += num_reqs

    def add_tokens(self, num_tokens: int) -> None:
        """Its prompts' tokens, once they are known; `ApiError` 503 if they do not fit."""
        self._admission.check_tokens(num_tokens)
        self._num_tokens += num_tokens
        self._admission.num_tokens += num_tokens

    def started(self, num_reqs: int, num_tokens: int) -> None:
        """So many of its sequences, and prompt tokens, wait no longer."""
        num_reqs, num_tokens = min(num_reqs, self._num_reqs), min(num_tokens, self._num_tokens)
        self._num_reqs -= num_reqs
        self._num_tokens -= num_tokens
        self._admission.num_reqs -= num_reqs
        self._admission.num_tokens -= num_tokens

    def leave(self) -> None:
        """Give back what is left; nothing when asked again."""
        self.started(self._num_reqs, self._num_tokens)
