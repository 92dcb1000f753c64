"""Requests: frozen facts, and the progress that scheduling changes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pagedserve.policy.errors import IllegalMove

if TYPE_CHECKING:
    from pagedserve.policy.group import DecodeGroup


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of a request when it arrives; nothing here ever changes.

    ``max_tokens`` is the declared output limit; the true output length is not known to a policy.
    ``prefix_keys`` holds one opaque key for every full prompt block (``num_prompt_tokens // block_size``
    of them): equal keys mean equal tokens from the prompt's start to that block's end. None: not cacheable.
    """

    id: int
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    prefix_keys: tuple[Hashable, ...] | None = None
    priority: int = 0
    tenant: str = ""
    deadline_ns: int | None = None
    predicted_output_tokens: int | None = None


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


LEGAL_MOVES: dict[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.RUNNING, Status.ABORTED),
    Status.RUNNING: (Status.PREEMPTED, Status.FINISHED, Status.ABORTED),
    # A preempted request may finish: its last token was in flight when it lost its blocks.
    Status.PREEMPTED: (Status.RUNNING, Status.FINISHED, Status.ABORTED),
    Status.FINISHED: (),
    Status.ABORTED: (),
}


@dataclass(slots=True, eq=False)
class RequestState:
    """Progress of one request.

    A request has *known* tokens (prompt plus sampled output, the one in flight included) and *computed*
    tokens (whose KV exists or is being written by a scheduled step). There are no phases: a step assigns
    each scheduled request a number of tokens, and a step that ends at the known tokens samples one more.

    While the request is in the decode group its progress follows from the group's round counter, so that
    a step costs nothing per running request: read it through the properties.
    """

    request: Request
    limit: int
    """Output tokens after which it ends with "length"; see `Limits.output_limit`."""
    intake: int
    """Position in the order of ``add`` calls."""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)
    block_keys: list[Hashable] | None = None
    """Keys known so far: of prompt blocks, then of generated ones."""
    admission: int = 0
    """Position in the order of admissions; renewed on resumption."""
    first_schedule_ns: int | None = None
    num_preemptions: int = 0
    num_prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_recomputed_tokens: int = 0
    high_water: int = 0
    """Tokens that had been computed before a preemption."""
    host_blocks: tuple[int, ...] = ()
    """Blocks of host memory that hold its KV while it is preempted, if it was swapped out."""
    num_swapped_tokens: int = 0
    """Tokens whose KV they hold: its first ones."""
    samples_since: int | None = None
    """First step of the present unbroken run of sampling steps, None while it computes its prompt."""
    earlier_samples: tuple[int, ...] = ()
    """Steps before that run that sampled for it and were in flight when the run was broken."""
    base_computed: int = 0
    base_sampled: int = 0
    base_last_step: int | None = None
    mark: int = 0
    group: DecodeGroup | None = None
    group_ticket: int | None = None
    queue_ticket: int | None = None

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def num_rounds(self) -> int:
        """Decode rounds done since it joined the decode group."""
        return 0 if self.group is None else self.group.num_rounds - self.mark

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is written or being written by a scheduled step."""
        return self.base_computed + self.num_rounds

    @property
    def num_output_tokens(self) -> int:
        """Output tokens sampled so far, those of steps in flight included; exact once finished."""
        return self.base_sampled + self.num_rounds

    @property
    def num_known_tokens(self) -> int:
        """Prompt and sampled output tokens."""
        return self.request.num_prompt_tokens + self.num_output_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        return self.request.num_prompt_tokens + self.base_sampled - self.base_computed

    @property
    def last_step(self) -> int | None:
        """The newest step that computes a token of it, or None before the first."""
        return self.group.last_step if self.group is not None and self.num_rounds else self.base_last_step

    def move(self, status: Status) -> None:
        """Change the status along ``LEGAL_MOVES``, or raise `IllegalMove` naming both."""
        if status not in LEGAL_MOVES[self.status]:
            raise IllegalMove(f"request {self.id} cannot move from {self.status.value} to {status.value}")
        self.status = status
