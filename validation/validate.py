"""The two halves joined: one trace, one policy, simulated and live, and by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from pagedserve.engine.engine import Engine
from pagedserve.engine.params import SamplingParams
from pagedserve.metrics.compare import VALIDATED_METRICS, error_pct
from pagedserve.metrics.profile import Profile
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import summarize
from pagedserve.policy import policy
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.traces.trace import Trace
from pagedserve.validation.decisions import Decisions, check_decisions
from pagedserve.validation.live import replay
from pagedserve.validation.planning import Setting, Traffic
from pagedserve.validation.prompts import TracePrompts
from pagedserve.validation.send_lag import SendLag

Progress = Callable[[int, int], None]
WARM_UP_PROMPT, WARM_UP_OUTPUT = 64, 8


class LiveBench:
    """Replays on one model, each on a fresh engine: empty queues, empty prefix cache, the same KV memory."""

    def __init__(self, idle: Engine) -> None:
        """``idle``: an engine without requests, whose model, vocabulary, limits and KV memory are used."""
        if idle.has_work:
            raise ValueError(f"the engine has {idle.num_live} live requests; give an idle one")
        self.model, self.vocabulary, self.limits = idle.runner.model, idle.vocabulary, idle.limits
        self._kv, self._graphs = idle.runner.kv, idle.runner.graphs

    def engine(self, setting: Setting) -> Engine:
        """A fresh engine in this setting; the one before must be idle. ValueError for another pool."""
        limits, kv = setting.limits, self._kv
        if (limits.num_blocks, limits.block_size) != (kv.num_blocks, kv.block_size):
            raise ValueError(
                f"the setting has {limits.num_blocks} blocks of {limits.block_size} tokens, the engine's cache "
                f"{kv.num_blocks} of {kv.block_size}; they must be the same"
            )
        engine = Engine(
            self.model,
            self.vocabulary,
            setting.policy,
            limits,
            overlap_depth=setting.overlap_depth,
            kv=kv,
        )
        engine.runner.graphs = self._graphs
        return engine

    def warm_up(self) -> None:
        """Run a few steps, so that the first ones measured find memory and kernels ready."""
        engine = self.engine(Setting(policy("mixed", watermark=0.0), self.limits))
        room = min(self.limits.max_model_len, self.limits.num_slots)
        length = max(1, min(WARM_UP_PROMPT, room - WARM_UP_OUTPUT))
        prompt = [index % self.vocabulary.size for index in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_OUTPUT, ignore_eos=True)
        try:
            engine.submit(prompt, params)
            while engine.has_work:
                engine.step()
        finally:
            engine.close()

    def replay(
        self, trace: Trace, setting: Setting, *, seed: int = 0, progress: Progress | None = None
    ) -> RunRecord:
        """One live run of a trace; ``seed`` draws its prompts' tokens."""
        engine = self.engine(setting)
        prompts = TracePrompts(trace, self.vocabulary.size, seed)
        try:
            return replay(engine, trace, prompts, max_tokens=setting.max_tokens, progress=progress)
        finally:
            engine.close()


@dataclass(frozen=True, slots=True)
class Validation:
    """What `validate` found. ``table``: one row a metric; live values are medians over the repeats.

    Units are those of `Summary`: seconds, tokens per second, and shares from 0 to 1; errors are in percent.
    """

    settings: dict[str, Any]
    table: pd.DataFrame
    decisions: Decisions
    simulated: RunRecord
    live: tuple[RunRecord, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values: ``settings``, ``metrics`` by name, ``decisions``."""
        return {
            "settings": self.settings,
            "metrics": {
                str(name): {column: _json(value) for column, value in row.items()}
                for name, row in self.table.to_dict("index").items()
            },
            "decisions": {
                "steps_live": self.decisions.steps_live,
                "steps_identical": self.decisions.steps_identical,
                "first_difference": self.decisions.first_difference,
            },
        }


def validate(
    bench: LiveBench,
    traffic: Traffic,
    setting: Setting,
    profile: Profile,
    *,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[str], Progress | None] | None = None,
) -> Validation:
    """Simulate the planned arrivals, replay them live ``repeats`` times, compare, and check every decision.

    The profile was measured before, knows nothing of this traffic and is not changed by it. The decision
    check replays each live run's own intake and times through the simulator. ``progress(label)`` gives what
    is to be called for the run of that name.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    cost = MeasuredCost(profile)
    simulated = setting.simulated(traffic.trace, cost)
    bench.warm_up()
    live: list[RunRecord] = []
    for number in range(1, repeats + 1):
        told = None if progress is None else progress(f"live run {number} of {repeats}")
        live.append(bench.replay(traffic.trace, setting, seed=seed, progress=told))
    return validation_of(traffic, setting, profile, simulated, live, seed=seed)


def validation_of(
    traffic: Traffic,
    setting: Setting,
    profile: Profile,
    simulated: RunRecord,
    live: Sequence[RunRecord],
    *,
    seed: int = 0,
) -> Validation:
    """The comparison of runs that were made already, by a script that interleaves several, say."""
    settings = {
        **traffic.as_dict(),
        "policy": setting.policy.name,
        "limits": asdict(setting.limits),
        "overlap_depth": setting.overlap_depth,
        "max_tokens": setting.max_tokens or int(traffic.trace.num_output_tokens.max()),
        "repeats": len(live),
        "seed": seed,
        "profile_sha256": profile.sha256(),
        "profile_date": profile.provenance.get("date"),
        "num_steps_extrapolated": simulated.header["counters"].get("num_extrapolated"),
        "device": live[0].header["device"],
        "send_lag_max_s": [SendLag.of(record).max_s for record in live],
    }
    decisions = [check_decisions(record, setting.policy) for record in live]
    worst = next((found for found in decisions if not found.identical), decisions[0])
    total = Decisions(
        sum(found.steps_live for found in decisions),
        sum(found.steps_identical for found in decisions),
        worst.first_difference,
    )
    return Validation(settings, comparison(live, simulated), total, simulated, tuple(live))


def comparison(live: Sequence[RunRecord], simulated: RunRecord) -> pd.DataFrame:
    """One row a metric: ``live`` (median), ``simulated``, ``error_pct``, ``live_repeat_spread_pct``.

    The spread is (max - min) / median of the repeats, in percent; NaN of a single one.
    """
    runs, predicted = [summarize(record) for record in live], summarize(simulated)
    rows = []
    for name in VALIDATED_METRICS:
        values = [float(getattr(run, name)) for run in runs]
        middle, other = float(np.median(values)), float(getattr(predicted, name))
        spread = 100 * (max(values) - min(values)) / middle if len(values) > 1 and middle else math.nan
        rows.append((middle, other, error_pct(middle, other), spread))
    return pd.DataFrame(
        rows,
        index=pd.Index(VALIDATED_METRICS, name="metric"),
        columns=pd.Index(["live", "simulated", "error_pct", "live_repeat_spread_pct"]),
    )


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
