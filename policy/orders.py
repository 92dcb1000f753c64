"""Who is admitted first, and who gives way when KV blocks run out.

A rule of one's own is a class with the one method; say ``key_is_fixed = True`` when an order's key does
not depend on the time, and it is computed once instead of at every instant.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pagedserve.policy.errors import IllegalPlan
from pagedserve.policy.request import RequestState


class AdmissionOrder(Protocol):
    """The order in which waiting requests are admitted."""

    def key(self, state: RequestState, now_ns: int) -> Any:
        """A sort key: the smallest is admitted first; ties follow the order of ``add``."""
        ...


class Fcfs:
    """First come, first served, by arrival time.

    A head that does not fit holds back all behind it: nothing starves, and small requests may wait for a
    large one.
    """

    key_is_fixed = True

    def key(self, state: RequestState, now_ns: int) -> int:
        """The arrival time in ns."""
        return state.request.arrival_ns


class VictimRule(Protocol):
    """Which running request is preempted when another needs blocks."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """One of ``candidates`` (running requests in admission order, the one in need included), or None.

        Picking the one in need makes it wait; None preempts nobody, and it stays with what it holds. A rule
        under which requests can evict each other in turn, such as "oldest", may never end.
        """
        ...


class Newest:
    """The request admitted last gives way (vLLM V1 under FCFS)."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """The last of ``candidates``."""
        return candidates[-1] if candidates else None


def choose_victim(
    rule: VictimRule,
    candidates: list[RequestState],
    needy: RequestState,
    num_releasable: Callable[[RequestState], int],
    now_ns: int,
) -> RequestState | None:
    """The rule's choice among ``candidates`` whose preemption frees a block.

    Requests whose blocks are all shared are passed over; if that leaves nobody, the rule's first choice goes
    all the same, for then only several victims together free a block.
    """
    first = None
    while candidates:
        victim = rule.pick(candidates, now_ns)
        if victim is not None and victim not in candidates:
            raise IllegalPlan(
                f"{type(rule).__name__} picked request {victim.id}, which is {victim.status.value} and not "
                "among the candidates it was given"
            )
        if victim is None or victim is needy or num_releasable(victim):
            return victim
        first = first or victim
        candidates.remove(victim)
    return first
