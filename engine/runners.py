"""What an engine needs of whatever runs its steps, and of whatever makes that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pagedserve.engine.loop import Runner

if TYPE_CHECKING:
    from pagedserve.engine.intake import Vocabulary
    from pagedserve.engine.keys import PrefixKeys
    from pagedserve.engine.params import SamplingParams
    from pagedserve.engine.sequences import SequenceState
    from pagedserve.engine.token_events import TokenEvent
    from pagedserve.kernels.kv_cache import KVCache
    from pagedserve.policy import Limits


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What a record's header says of a runner; ``counters`` are as of now."""

    kind: str
    """The record's kind: "live" where a model computed, "simulated" where none did."""
    device: dict[str, Any]
    cost: dict[str, Any] | None = None
    packages: tuple[str, ...] = ()
    """Distributions whose versions matter to what it does."""
    counters: dict[str, int] = field(default_factory=dict)


class EngineRunner(Runner, Protocol):
    """Runs the steps of one engine, knows its sequences' tokens, and decides their stops."""

    @property
    def keys(self) -> PrefixKeys | None:
        """Makes the keys of full blocks; None without a prefix cache."""
        ...

    @property
    def events(self) -> Sequence[TokenEvent]:
        """The tokens of the step waited for last."""
        ...

    @property
    def facts(self) -> RunnerFacts:
        """What a record says of it."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError, which names the parameter, for what this runner cannot do."""
        ...

    def expect(self, sequence: SequenceState) -> None:
        """Take what the scheduler does not know of a request, before it is added there."""
        ...

    def forget(self, request: int) -> None:
        """A request was refused or ended before any step; others go as plans name them departed."""
        ...

    def hurry(self) -> None:
        """The engine is closing: what runs may end early. Called from any thread."""
        ...

    def close(self) -> None:
        """Stop what runs beside the engine; called when no step is in flight."""
        ...


AnyRunner = TypeVar("AnyRunner", bound=EngineRunner, covariant=True)


class RunnerMaker(Protocol[AnyRunner]):
    """What an engine is made around: a `Model`, or whatever else can run its steps."""

    @property
    def max_model_len(self) -> int:
        """Positions that it has."""
        ...

    def make_runner(
        self,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        overlaps: bool,
        caches_prefixes: bool,
        kv: KVCache | None = None,
    ) -> AnyRunner:
        """A runner for one engine. ``overlaps``: a step is launched before the one before is waited for.

        ``kv``: a cache of the limits' size to use instead of a new one.
        """
        ...
