"""The engine: a loop around the shared policy, a model runner, and the completions of its callers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

from pagedserve.engine.intake import Intake, RequestOptions, Vocabulary
from pagedserve.engine.loop import EngineLoop, NoRecorder
from pagedserve.engine.outputs import CompletionState, Delta
from pagedserve.engine.params import SamplingParams, check_token_ids
from pagedserve.engine.runners import AnyRunner, RunnerMaker
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.metrics.header import run_header
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.recorder import Recorder
from pagedserve.policy import Finished, Limits, Policy, Request, RequestRefused, RequestState, Scheduler

Listener = Callable[[Delta], None]


class EngineDead(RuntimeError):
    """The engine was closed, or its thread ended with an error; nothing runs any more."""


class Engine(Generic[AnyRunner]):
    """Requests in, deltas out; `step` does the work in whatever thread calls it.

    ``submit`` and ``abort`` may be called from any thread. Listeners are called in the thread of `step`. The
    policy is a specification: the engine works on a deep copy of it.
    """

    def __init__(
        self,
        model: RunnerMaker[AnyRunner],
        vocabulary: Vocabulary,
        policy: Policy,
        limits: Limits,
        *,
        overlap_depth: int = 0,
        seed: int | None = None,
        kv: KVCache | None = None,
        record: bool = True,
    ) -> None:
        """``model``: a `Model`, or what else makes a runner. ``kv``: a cache of the limits' size, of an idle
        engine, to use instead of a new one.

        ``record`` keeps every step, call and plan for `record`, and so grows for as long as the engine runs;
        without it memory stays bounded, and `record` raises. ``seed`` is for requests that bring none; None has
        one drawn, which the record tells.
        Raises ValueError if the limits ask for more positions than the model has, or an EOS id is no token.
        """
        num_positions = model.max_model_len
        if limits.max_model_len > num_positions:
            raise ValueError(
                f"max_model_len is {limits.max_model_len}; the model has {num_positions} positions: lower it"
            )
        check_token_ids("eos_token_ids", sorted(vocabulary.eos_token_ids), vocabulary.size)
        self.limits = limits
        self.scheduler = Scheduler(policy, limits, overlap_depth)
        self.runner = model.make_runner(
            limits if policy.can_swap else replace(limits, num_cpu_blocks=0),  # no memory for nothing
            vocabulary,
            overlaps=overlap_depth > 0,
            caches_prefixes=policy.enable_prefix_caching,
            kv=kv,
        )
        self._recorder = Recorder(self.scheduler, keep_plans=True) if record else None
        self.loop = EngineLoop(self.scheduler, self.runner, self._recorder or NoRecorder())
        self.loop.on_added = self._added
        self.loop.on_commit = self._committed
        self.loop.on_abort = self._end
        self.loop.on_refused = self._refused
        self.intake = Intake(vocabulary, limits, self.runner.keys, seed)
        self._closed = False
        self._error: BaseException | None = None
        self._live: dict[int, tuple[CompletionState, Listener | None]] = {}

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        listener: Listener | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        deadline_ns: int | None = None,
        predicted_output_tokens: int | None = None,
        cache_salt: str | None = None,
        stop_after: int | None = None,
        due_ns: int | None = None,
    ) -> list[CompletionState]:
        """Hand a prompt in; ``params.n`` completions come back, which grow as the engine steps.

        ``prompt`` is text or token ids. ``priority`` to ``predicted_output_tokens`` are for the policy to go by;
        ``deadline_ns`` is on the engine's clock, ``time.monotonic_ns``. ``stop_after`` scripts a stop after so
        many output tokens (a replay's true length). Raises ValueError for ids outside the vocabulary, numbers
        below 1, a form of output that cannot be had or a prompt that can never run, and `EngineDead` when it has
        stopped.
        """
        self._check_alive()
        arrival_ns = self.loop.clock()  # before the prompt is tokenised: that is time its caller waits
        options = RequestOptions(
            priority, tenant, deadline_ns, predicted_output_tokens, cache_salt, stop_after
        )
        self.check(params)
        states = [
            CompletionState(sequence)
            for sequence in self.intake.sequences(prompt, params, options, arrival_ns)
        ]
        for state in states:
            self._hand_in(state, listener, due_ns)
        return states

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that cannot be honoured; from any thread."""
        params.validate_for_vocab(self.vocabulary.size)
        self.runner.check(params)
        self.intake.grammar(params)

    def _hand_in(self, state: CompletionState, listener: Listener | None, due_ns: int | None) -> None:
        request = state.sequence.request
        self._live[request.id] = (state, listener)
        self.runner.expect(state.sequence)
        self.loop.add(request, due_ns)

    @property
    def vocabulary(self) -> Vocabulary:
        """What it knows of the tokenizer."""
        return self.intake.vocabulary

    @property
    def seed(self) -> int:
        """What the seeds are drawn from of requests that bring none."""
        return self.intake.seed

    def abort(self, request: int, reason: str = "abort") -> None:
        """Ask for a request's end; nothing happens if it has ended."""
        self.loop.abort(request, reason)

    def abort_all(self, reason: str = "abort") -> None:
        """Ask for the end of every request that was handed in."""
        for request in list(self._live):
            self.abort(request, reason)

    def step(self) -> bool:
        """One turn of the loop; False when there is nothing to do until something is handed in.

        What it raises leaves policy and device apart, so that the engine is dead from then on. Raises
        `EngineDead` then, and after `close`.
        """
        self._check_alive()
        try:
            return self.loop.step()
        except BaseException as error:
            self._error = error
            raise

    @property
    def has_work(self) -> bool:
        """Whether any request is handed in or alive, or a step in flight."""
        return self.loop.has_work

    @property
    def is_ready(self) -> bool:
        """Whether a step would do something now."""
        return self.loop.is_ready

    @property
    def seconds_to_wake(self) -> float | None:
        """How long it may sleep unless something is handed in; None: for ever."""
        wake_ns = self.loop.wake_ns
        return None if wake_ns is None else max(0, wake_ns - self.loop.clock()) / 1e9

    @property
    def num_stranded(self) -> int:
        """Requests that wait for ever unless something is handed in: nothing runs, and the policy names no time."""
        return 0 if self.is_ready or self.loop.wake_ns is not None else len(self.scheduler.states)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def hurry(self) -> None:
        """End what runs as early as can be; from any thread, before `close`."""
        self.runner.hurry()

    def close(self) -> None:
        """Stop the device thread; the record can still be taken, nothing else be done.

        The memory is free when the last reference goes, without waiting for the garbage collector.
        """
        self._closed = True
        self.runner.close()
        self.loop.unhook()

    def _check_alive(self) -> None:
        if self._closed or self._error is not None:
            why = self._error or "it was closed"
            raise EngineDead(f"the engine has stopped: {why}; make a new one") from self._error

    def record(self, trace: dict[str, Any] | None = None) -> RunRecord:
        """The run so far, with its plans, so that it can be replayed by `simulate`.

        Call it between two steps; where an `AsyncEngine` steps, take its own ``record``. Raises RuntimeError
        if the engine was made to keep none.
        """
        if self._recorder is None:
            raise RuntimeError("the engine keeps no record: it was made with record=False; leave that out")
        facts = self.runner.facts
        header = run_header(
            facts.kind,
            self.scheduler,
            trace=trace or {},
            seed=self.seed,
            device=facts.device,
            cost=facts.cost,
            packages=facts.packages,
            counters=facts.counters,
        )
        return self._recorder.record(header)

    def _added(self, state: RequestState) -> None:
        self._live[state.id][0].progress = state

    def _committed(self, finished: list[Finished]) -> None:
        for event in self.runner.events:
            live = self._live.get(event.request)
            if live is not None:
                self._tell(live[1], live[0].take(event, self.loop.last_ns))
        for end in finished:
            self._end(end.request, end.reason)

    def _end(self, request: int, reason: str) -> None:
        state, listener = self._live.pop(request)
        state.sequence.ended = True
        if state.sequence.seat is None:
            self.runner.forget(request)
        self._tell(listener, state.finish(reason, self.loop.last_ns))

    def _refused(self, request: Request, error: RequestRefused) -> None:
        state, listener = self._live.pop(request.id)
        self.runner.forget(request.id)
        state.error = str(error)
        self._tell(listener, state.finish("error", self.loop.last_ns))

    @staticmethod
    def _tell(listener: Listener | None, delta: Delta) -> None:
        if listener is not None:
            listener(delta)
