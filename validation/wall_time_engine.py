"""The engine over the simulator: its policy, its loop and its streams; steps that only take the time they would."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagedserve.engine.engine import Engine
from pagedserve.engine.keys import PrefixKeys
from pagedserve.engine.layout import sampled_by
from pagedserve.engine.loop import LoopObserver
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runners import RunnerFacts
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.token_events import TokenEvent, filled_keys, outcomes_of, token_event
from pagedserve.policy import Finished, Limits, Outcome, Policy, Request, RequestState, Scheduler, StepPlan
from pagedserve.simulator.wall_time import WallTimeState
from pagedserve.traces.lengths import LengthDist
from pagedserve.validation.filler import Filler, check_filler_params

if TYPE_CHECKING:
    from pagedserve.engine.intake import Vocabulary
    from pagedserve.kernels.kv_cache import KVCache


class WallTimeRunner:
    """An engine's runner whose steps last as long as a cost model says and bring filler tokens."""

    def __init__(self, wall: WallTimeState, filler: Filler, keys: PrefixKeys | None) -> None:
        self.wall, self.filler, self.keys = wall, filler, keys
        self.events: list[TokenEvent] = []
        self._num_extrapolated = wall.cost.num_extrapolated
        self._newcomers: dict[int, SequenceState] = {}
        self._sequences: dict[int, SequenceState] = {}
        # Steps with the sequences that they are about, which may have departed when they are waited for.
        self._launched: deque[tuple[StepPlan, tuple[int, ...], dict[int, SequenceState]]] = deque()

    @property
    def facts(self) -> RunnerFacts:
        """See `pagedserve.engine.runners.EngineRunner.facts`."""
        wall, cost = self.wall, self.wall.cost.describe()
        counters = {
            "num_extrapolated": wall.cost.num_extrapolated - self._num_extrapolated,
            "num_late_steps": wall.num_late_steps,
            "num_cut_steps": wall.num_cut_steps,
            "late_ns": wall.late_ns,
            "max_late_ns": wall.max_late_ns,
        }
        return RunnerFacts("simulated", {"name": cost.get("device"), "time": "wall"}, cost, counters=counters)

    def check(self, params: SamplingParams) -> None:
        """See `pagedserve.engine.runners.EngineRunner.check`."""
        check_filler_params(params)

    def expect(self, sequence: SequenceState) -> None:
        """See `pagedserve.engine.runners.EngineRunner.expect`."""
        self.filler.expect(sequence)
        self._newcomers[sequence.request.id] = sequence

    def forget(self, request: int) -> None:
        """See `pagedserve.engine.runners.EngineRunner.forget`."""
        if self._newcomers.pop(request, None) is not None:
            self.filler.forget(request)

    def hurry(self) -> None:
        """End the step that runs, and all that follow, at once."""
        self.wall.clock.stop()

    def close(self) -> None:
        """Nothing runs beside the engine."""

    def can_launch_ahead(self, plan: StepPlan) -> bool:
        """See `pagedserve.engine.loop.Runner.can_launch_ahead`: always, as no token depends on another."""
        return True

    def launch(self, plan: StepPlan) -> None:
        """See `pagedserve.engine.loop.Runner.launch`; returns when the modelled host would have launched it."""
        for request in plan.departed:
            self._sequences.pop(request, None)
            self.filler.forget(request)
        for request in plan.new_requests:
            self._sequences[request.id] = self._newcomers.pop(request.id)
        sampled = sampled_by(plan)
        concerned = {*sampled, *(request for request, _ in plan.filled)}
        self._launched.append((plan, sampled, {request: self._sequences[request] for request in concerned}))
        self.wall.launch(plan.shape)

    def wait(self) -> Sequence[Outcome]:
        """See `pagedserve.engine.loop.Runner.wait`."""
        plan, sampled, sequences = self._launched.popleft()
        # The tokens are made while the step runs: their work is hidden in its time.
        self.events = [self._event(sequences[r]) for r in sampled if not sequences[r].ended]
        outcomes = outcomes_of(sampled, self.events, filled_keys(plan, sequences, self.keys))
        self.wall.wait()
        return outcomes

    def _event(self, sequence: SequenceState) -> TokenEvent:
        token_id = self.filler.next_token(sequence)
        sequence.token_ids.append(token_id)
        return token_event(sequence, token_id)


class WallTimeObserver:
    """Tells the wall time what the loop does, and passes it on."""

    def __init__(self, scheduler: Scheduler, wall: WallTimeState, recorder: LoopObserver) -> None:
        self._scheduler, self._wall, self._inner = scheduler, wall, recorder

    def added(self, state: RequestState, due_ns: int, now_ns: int) -> None:
        """See `Recorder.added`."""
        self._inner.added(state, due_ns, now_ns)
        self._wall.arrived(state.request.arrival_ns)

    def refused(self, request: Request, due_ns: int, now_ns: int, error: str) -> None:
        """See `Recorder.refused`."""
        self._inner.refused(request, due_ns, now_ns, error)

    def aborted(self, request: int, now_ns: int, reason: str = "abort") -> None:
        """See `Recorder.aborted`."""
        self._inner.aborted(request, now_ns, reason)

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """See `Recorder.scheduled`."""
        self._inner.scheduled(plan, now_ns)
        if plan:
            self._wall.planned(now_ns)
        else:
            self._wall.not_planned()

    def launched(self, now_ns: int) -> None:
        """See `Recorder.launched`."""
        self._inner.launched(now_ns)
        self._wall.may_plan(self._scheduler.has_work)

    def committed(
        self, step: int, outcomes: Sequence[Outcome], finished: list[Finished], now_ns: int
    ) -> None:
        """See `Recorder.committed`."""
        self._inner.committed(step, outcomes, finished, now_ns)
        self._wall.may_plan(self._scheduler.has_work)


class WallTimeModel:
    """What an `Engine` is made around to be simulated: times instead of weights."""

    def __init__(self, wall: WallTimeState, max_model_len: int, lengths: LengthDist | None = None) -> None:
        """``max_model_len``: positions of the model that is simulated. ``lengths``: see `Filler`."""
        self.wall, self.max_model_len, self._lengths = wall, max_model_len, lengths

    def make_runner(
        self,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        overlaps: bool,
        caches_prefixes: bool,
        kv: KVCache | None = None,
    ) -> WallTimeRunner:
        """See `pagedserve.engine.runners.RunnerMaker`. ValueError for a ``kv``: nothing would be kept in it."""
        if kv is not None:
            raise ValueError("kv is given, but a simulated engine keeps no keys and values: leave it out")
        keys = PrefixKeys(limits.block_size) if caches_prefixes else None
        return WallTimeRunner(self.wall, Filler(vocabulary, self._lengths), keys)


def wall_time_engine(
    model: WallTimeModel, vocabulary: Vocabulary, policy: Policy, limits: Limits, **options: Any
) -> Engine[WallTimeRunner]:
    """An engine in wall time; ``options`` are the others of `Engine`.

    Its record is of kind "simulated", with the cost model, and says how many steps were late or cut short.
    """
    engine = Engine(model, vocabulary, policy, limits, **options)
    engine.loop.recorder = WallTimeObserver(engine.scheduler, model.wall, engine.loop.recorder)
    engine.loop.clock = model.wall.clock.now_ns
    return engine
