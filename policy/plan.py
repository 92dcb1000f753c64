"""What the scheduler tells a runner or a clock: plans in, outcomes back, all plain values."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from pagedserve.policy.request import Request


class PrefillChunk(NamedTuple):
    """``num_tokens`` known tokens of ``request`` from position ``start``; ``samples``: up to the last one."""

    request: int
    start: int
    num_tokens: int
    samples: bool


class Swap(NamedTuple):
    """KV of ``request`` to copy: ``blocks[i]`` of the pool and ``host_blocks[i]`` of host memory, whole blocks."""

    request: int
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a cost model sees of a step; exact integers.

    ``chunks`` holds ``(num_tokens, context)`` for each prefill chunk, context being the tokens in KV before
    it. Every decode computes one token; the context sums are over the decode group, in tokens in KV before
    this step. ``num_samples`` rows go through the LM head. Blocks swapped are copied between device and
    host memory before anything is computed.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    num_decodes: int = 0
    decode_context_sum: int = 0
    decode_context_max: int = 0
    decode_context_sumsq: int = 0
    num_samples: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(chunk[0] for chunk in self.chunks) + self.num_decodes


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as a delta against the worker's mirror of requests and block tables.

    A worker applies, in this order: ``departed`` (forget them), ``preempted`` (forget their block tables),
    ``left`` and ``joined`` (members of the decode group), ``new_requests`` (facts, sent once), ``new_blocks``
    (appended to block tables; cached prefix blocks come first), copies ``swapped_out`` to the host, then
    ``swapped_in`` from it, and then computes ``chunks`` and one token for each of ``decodes``. ``decodes`` is
    the same tuple object as long as the group does not change, and empty in a step that does not run it.

    ``filled`` names ``(request, block index)`` completed by this step whose key the scheduler does not know:
    their keys are due in the outcomes. ``step`` is None for an empty plan, which is never launched;
    then ``wake_ns`` may say when to ask again though nothing happens meanwhile.
    """

    step: int | None
    new_requests: tuple[Request, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    decodes: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    departed: tuple[int, ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    filled: tuple[tuple[int, int], ...] = ()
    swapped_out: tuple[Swap, ...] = ()
    swapped_in: tuple[Swap, ...] = ()
    shape: StepShape = StepShape()
    num_recomputed_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    wake_ns: int | None = None

    def __bool__(self) -> bool:
        return self.step is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought for one request.

    Only requests with something to say need one: a request that sampled has ``num_tokens=1`` without a stop
    by default. ``stop_reason`` ends the request with that reason ("stop", ...); with ``num_tokens=0`` it ends
    without the token it was to sample, which could not be chosen. ``new_block_keys`` are the keys of the
    request's blocks named in the plan's ``filled``, in that order.
    """

    request: int
    num_tokens: int = 1
    stop_reason: str | None = None
    new_block_keys: tuple[Hashable, ...] = ()


class Finished(NamedTuple):
    """A request that ended at a commit: why, and with how many output tokens."""

    request: int
    reason: str
    num_output_tokens: int
