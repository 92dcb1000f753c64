"""The waiting queue: preempted requests first, then the admission order's key, then intake order."""

import heapq
from collections.abc import Iterator
from typing import Any

from pagedserve.policy.orders import AdmissionOrder
from pagedserve.policy.request import RequestState


class WaitingQueue:
    """A heap with lazy removal: adding, taking the first and removing cost O(log n)."""

    def __init__(self, order: AdmissionOrder) -> None:
        self._order = order
        self._fixed = getattr(order, "key_is_fixed", False)
        self._heap: list[tuple[bool, Any, int, int, RequestState]] = []
        self._num_tickets = self._size = 0
        self._keyed_ns: int | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[RequestState]:
        """All waiting requests, in no order."""
        return (entry[4] for entry in self._heap if entry[4].queue_ticket == entry[3])

    def push(self, state: RequestState, now_ns: int, resumes: bool = False) -> None:
        """Enter a request; ``resumes``: it was preempted and goes before those that never ran."""
        key = self._order.key(state, now_ns)
        self._num_tickets += 1
        self._size += 1
        state.queue_ticket = self._num_tickets
        heapq.heappush(self._heap, (not resumes, key, state.intake, self._num_tickets, state))

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        assert state.queue_ticket is not None
        state.queue_ticket = None
        self._size -= 1

    def first(self, now_ns: int) -> RequestState | None:
        """The next request to admit, which stays in the queue; None when empty."""
        self._rekey(now_ns)
        while self._heap and self._heap[0][4].queue_ticket != self._heap[0][3]:
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

    def in_order(self, now_ns: int) -> list[RequestState]:
        """All waiting requests in admission order; costs a sort."""
        self._rekey(now_ns)
        return [entry[4] for entry in sorted(self._heap) if entry[4].queue_ticket == entry[3]]

    def _rekey(self, now_ns: int) -> None:
        """Keys that depend on the time are computed anew, once for each instant."""
        if self._fixed or self._keyed_ns == now_ns:
            return
        self._keyed_ns = now_ns
        self._heap = [
            (fresh, self._order.key(state, now_ns), intake, ticket, state)
            for fresh, _, intake, ticket, state in self._heap
            if state.queue_ticket == ticket
        ]
        heapq.heapify(self._heap)
