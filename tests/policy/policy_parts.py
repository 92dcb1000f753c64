"""Policy parts that a user might write, for the tests: all legal."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagedserve.policy import RequestState, Status
from pagedserve.policy.step import Step


class OldestVictim:
    """Preempts the request admitted first: two that both lack blocks may preempt each other for ever."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """The first of ``candidates``."""
        return candidates[0] if candidates else None


class OldestTwiceVictim:
    """Preempts the oldest that was not preempted twice already, else the newest: so that everyone ends."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """The first of ``candidates`` with fewer than two preemptions, or the last."""
        return next((state for state in candidates if state.num_preemptions < 2), candidates[-1])


class FewestComputedVictim:
    """Preempts whoever has least to compute again."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """The one with the fewest computed tokens; the newest of equals."""
        return min(reversed(candidates), key=lambda state: state.num_computed_tokens, default=None)


@dataclass(slots=True)
class SwapLong:
    """Swaps whoever has much to compute again, whether there is room or not."""

    num_tokens: int

    def swaps(self, victim: RequestState, num_blocks: int, num_free_host_blocks: int) -> bool:
        """From ``num_tokens`` on."""
        return victim.num_computed_tokens >= self.num_tokens


class ShortestPromptFirst:
    """Admits the shortest prompt first."""

    key_is_fixed = True

    def key(self, state: RequestState, now_ns: int) -> int:
        """The prompt length in tokens."""
        return state.request.num_prompt_tokens


@dataclass(slots=True)
class Ageing:
    """Shortest prompt first, but a request gains a token of credit for every ``ns_per_token`` it waits."""

    ns_per_token: int = 10

    def key(self, state: RequestState, now_ns: int) -> int:
        """Prompt length in tokens less the credit; depends on the time."""
        return state.request.num_prompt_tokens - (now_ns - state.request.arrival_ns) // self.ns_per_token


class AdmitBeforeDecode:
    """Admits one request, then decodes: decodes may take back what the admission was given."""

    def compose(self, step: Step) -> None:
        """Leave a token for every running request, spend the rest on a new one."""
        spare = step.num_tokens - step.num_running
        state = step.next_waiting()
        if state is not None and spare > 0:
            step.admit(state, num_tokens=spare)
        step.decode()
        step.continue_prefills()


class SmallChunks:
    """Decodes, then two tokens of every prompt in progress, then one new request."""

    def compose(self, step: Step) -> None:
        """A chunk may preempt, so a request's status is looked at before its turn."""
        step.decode()
        for state in step.prefilling():
            if step.num_tokens and state.status is Status.RUNNING:
                step.chunk(state, 2)
        step.admit_in_order(max_requests=1)


@dataclass(slots=True)
class WaitForCompany:
    """Starts when ``num_wanted`` requests wait or the first has waited ``patience_ns``; otherwise ``mixed``."""

    num_wanted: int = 2
    patience_ns: int = 50

    def compose(self, step: Step) -> None:
        """Say when to ask again while nothing is started."""
        step.decode()
        step.continue_prefills()
        first = step.next_waiting()
        if first is None:
            return
        due_ns = first.request.arrival_ns + self.patience_ns
        if step.num_waiting >= self.num_wanted or step.now_ns >= due_ns or first.num_preemptions:
            step.admit_in_order()
        else:
            step.wake_at(due_ns)


@dataclass(slots=True)
class PreemptAt:
    """``mixed``, but a request is preempted once, as soon as it has ``outputs`` tokens."""

    request: int
    outputs: int

    def compose(self, step: Step) -> None:
        """Preempt first, so that the step may still use what was freed."""
        for state in list(step.running):
            due = state.id == self.request and state.num_output_tokens == self.outputs
            if due and not state.num_preemptions:
                step.preempt(state)
        step.decode()
        step.continue_prefills()
        step.admit_in_order()


class AdmitThenPreempt:
    """Admits, and thinks better of it."""

    def compose(self, step: Step) -> None:
        """Preempt the newest, which was just admitted."""
        if step.admit_in_order():
            step.preempt(list(step.running)[-1])


class AdmissionsOnly:
    """Admits, and leaves those who run alone for a step."""

    def compose(self, step: Step) -> None:
        """Admit."""
        step.admit_in_order()


class DecodesOnly:
    """Leaves prompts alone for a step."""

    def compose(self, step: Step) -> None:
        """Decode."""
        step.decode()
