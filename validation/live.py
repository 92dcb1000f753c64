"""A trace on the real engine, in real time: open loop, as its users would send it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pagedserve.engine.engine import Engine
from pagedserve.engine.interrupts import InterruptsState
from pagedserve.engine.params import SamplingParams
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import IllegalPlan
from pagedserve.traces.trace import Trace
from pagedserve.validation.prompts import TracePrompts
from pagedserve.validation.runnable import check_runnable

START_DELAY_NS = 50_000_000
"""From when all prompts are made to the trace's time 0."""
LOOK_UP_S = 0.5


def replay(
    engine: Engine,
    trace: Trace,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunRecord:
    """Send every request of ``trace`` at its arrival, serve all to their true lengths, return the record.

    A thread sends on the wall clock whatever the engine does (open loop); this one steps the engine. Every
    request declares the same ``max_tokens`` (default: the trace's longest output) and EOS is ignored: that it
    stops at its true length is scripted after sampling, so the scheduler cannot know. ``prompts[i]`` are
    token ids as long as the trace says. ``progress(num_ended, num_requests)`` is called after steps.

    The engine must be fresh: its record and its prefix cache start here. Raises ValueError before anything is
    sent if a request can never run within the engine's limits; Ctrl-C takes effect between two steps.
    """
    sender = _SenderState(engine, trace, prompts, max_tokens)
    interrupts = InterruptsState()
    try:
        with interrupts.holding():
            sender.start()
            while not sender.is_done or engine.has_work:
                sender.raise_error()
                if not engine.is_ready:
                    sender.wait()
                    continue
                with interrupts.step():
                    engine.step()
                if progress is not None:
                    progress(max(0, sender.num_sent - engine.num_live), len(trace))
            sender.raise_error()
    finally:
        sender.stop()
    told = {"name": trace.name, "sha256": trace.sha256(), "num_requests": len(trace)}
    if isinstance(prompts, TracePrompts):
        told["prompt_seed"] = prompts.seed
    return engine.record(told)


class _SenderState:
    """The client's side: one thread that sleeps until a request is due and hands it in."""

    def __init__(
        self, engine: Engine, trace: Trace, prompts: Sequence[Sequence[int]], max_tokens: int | None
    ) -> None:
        if engine.has_work or engine.scheduler.next_step:
            raise ValueError("the engine has served requests already; replay on a fresh engine")
        if len(prompts) != len(trace):
            raise ValueError(f"{len(prompts)} prompts for a trace of {len(trace)} requests")
        limit = int(trace.num_output_tokens.max(initial=1)) if max_tokens is None else max_tokens
        check_runnable(trace, engine.limits, limit)
        self._engine, self._trace, self._prompts = engine, trace, prompts
        self._params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        self._condition = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pagedserve-sender", daemon=True)
        self.num_sent = 0
        self.is_done = False

    def start(self) -> None:
        """The trace's time 0 is a moment from now."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def raise_error(self) -> None:
        """What went wrong in the thread goes on here."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Sleep until a request is sent, or until the time that the policy named."""
        engine = self._engine
        with self._condition:
            self.raise_error()
            if self.is_done and engine.has_work and not engine.is_ready and engine.seconds_to_wake is None:
                raise IllegalPlan(
                    f"the policy schedules nothing while {engine.num_live} requests wait, nothing runs and no "
                    "other will come: they would wait for ever"
                )
            if not self.is_done and not engine.is_ready:
                wake_s = engine.seconds_to_wake
                # A signal that another thread was given is heeded when this one looks up.
                self._condition.wait(LOOK_UP_S if wake_s is None else min(wake_s, LOOK_UP_S))
                return
        if wake_s := engine.seconds_to_wake:
            time.sleep(min(wake_s, LOOK_UP_S))

    def _run(self) -> None:
        try:
            self._send()
        except BaseException as error:
            self._error = error
        with self._condition:
            self.is_done = True
            self._condition.notify_all()

    def _send(self) -> None:
        trace, engine = self._trace, self._engine
        prompts = [self._prompts[index] for index in range(len(trace))]
        for index, (prompt, wanted) in enumerate(zip(prompts, trace.num_prompt_tokens.tolist(), strict=True)):
            if len(prompt) != wanted:
                raise ValueError(f"prompts[{index}] has {len(prompt)} tokens; the trace says {wanted}")
        arrivals, lengths = trace.arrival_ns.tolist(), trace.num_output_tokens.tolist()
        start_ns = engine.loop.clock() + START_DELAY_NS
        for index, (prompt, arrival_ns, length) in enumerate(zip(prompts, arrivals, lengths, strict=True)):
            due_ns = start_ns + arrival_ns
            with self._condition:
                while not self._stopping and (left_ns := due_ns - engine.loop.clock()) > 0:
                    self._condition.wait(left_ns / 1e9)
                if self._stopping:
                    return
            engine.submit(
                prompt,
                self._params,
                priority=0 if trace.priority is None else int(trace.priority[index]),
                tenant="" if trace.tenant is None else str(trace.tenant[index]),
                stop_after=length,
                due_ns=due_ns,
            )
            with self._condition:
                self.num_sent += 1
                self._condition.notify_all()
