"""The other ranks of a model, as the runner of rank 0 sees them: they follow its plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pagedserve.engine.prompt_logprobs import PromptRows
from pagedserve.policy import Limits, Request, StepPlan

if TYPE_CHECKING:
    from pagedserve.engine.sequences import Mirrored


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request of a plan's ``new_requests``, with its prompt."""

    request: Request
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A new engine with these limits; ``reuses_cache``: with the KV cache of the one before."""

    limits: Limits
    reuses_cache: bool


@dataclass(frozen=True, slots=True)
class Largest:
    """Run the largest step that these limits allow, and tell rank 0 what it takes of the own device."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Compute these prompts to measure the scales of an eight-bit KV cache."""

    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that the plan seats again after a preemption, with the output tokens that it has."""

    request: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step to compute: the same delta that rank 0 has, and the rows whose logits rank 0 asks for.

    What is sampled comes within the step, from device to device, and stays there: only a request that was
    preempted is computed again from tokens of its output, and brings them.
    """

    plan: StepPlan
    newcomers: tuple[Newcomer, ...]
    resumed: tuple[Resumed, ...]
    prompts: tuple[PromptRows, ...]


Message = Begin | Calibrate | Largest | Step


class Ranks(Protocol):
    """All ranks but the first."""

    @property
    def size(self) -> int:
        """How many ranks there are, the first included."""
        ...

    def send(self, message: Message) -> None:
        """Tell all of them; returns at once. RuntimeError if one has ended."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class NoRanks:
    """The first rank is the only one."""

    size = 1

    def send(self, message: Message) -> None:
        """Nobody hears it."""

    def close(self) -> None:
        """Nothing to end."""


NO_RANKS = NoRanks()


def newcomers_of(plan: StepPlan, prompts: Sequence[Sequence[int]]) -> tuple[Newcomer, ...]:
    """The plan's new requests with their prompts, in its order."""
    return tuple(
        Newcomer(request, tuple(ids)) for request, ids in zip(plan.new_requests, prompts, strict=True)
    )


def resumed_of(seated: Sequence[Mirrored]) -> tuple[Resumed, ...]:
    """Of sequences that a plan seats, those that have output."""
    known = ((s.request, s.token_ids[s.request.num_prompt_tokens :]) for s in seated)
    return tuple(Resumed(request.id, tuple(ids)) for request, ids in known if ids)
