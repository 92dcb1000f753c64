"""The other ranks of a model, as the runner of rank 0 sees them: they follow its plans and are told its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagedserve.engine.prompt_logprobs import PromptRows
from pagedserve.policy import Limits, Request, StepPlan


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
    """Run the largest step that these limits allow, along with rank 0, which measures it."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Step:
    """A step to compute: the same delta that rank 0 has, and the rows whose logits rank 0 asks for."""

    plan: StepPlan
    newcomers: tuple[Newcomer, ...]
    prompts: tuple[PromptRows, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What rank 0 sampled in the oldest step that was not told of: (request, token id)."""

    chosen: tuple[tuple[int, int], ...]


Message = Begin | Largest | Step | Tokens


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
