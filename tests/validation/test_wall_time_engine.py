"""The engine in wall time does what `simulate` says, when it says; and its record retraces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from validation_engines import tiny_profile
from wall_time_runs import LIMITS, EventClock, greedy, run_to_the_end, wall_engine

from pagedserve.engine.engine import Engine
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Limits, Policy, policy
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.cost import CostModel
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.trace import Trace
from pagedserve.validation.decisions import check_decisions
from pagedserve.validation.wall_time_engine import WallTimeRunner

RULES = ("serial", "static", "prefill_first", "mixed", "vllm_v1")
MS = 1_000_000
COST = ConstantCost(2 * MS, 50_000, 100_000, 300_000)
SLOW = ConstantCost(2 * MS, 50_000, 100_000, 3 * MS)
"""The host takes longer than the device."""
TIGHT = replace(LIMITS, num_blocks=40)
SLACK_NS = 40
"""The engine's verbs never share an instant, the simulator's do; here at most so many fall on one."""


def trace_of(seed: int, count: int = 24) -> Trace:
    """Bursts with rests between them, in which the engine sleeps."""
    rng = np.random.default_rng(seed)
    gaps = np.where(
        rng.random(count) < 0.3, rng.integers(50 * MS, 200 * MS, count), rng.integers(0, MS, count)
    )
    prompts, outputs = rng.integers(1, 60, count), rng.integers(1, 30, count)
    return Trace.of("bursts", np.cumsum(gaps).tolist(), prompts.tolist(), outputs.tolist())


def served(
    trace: Trace, cost: CostModel, spec: str | Policy, limits: Limits, depth: int
) -> tuple[RunRecord, Engine[WallTimeRunner]]:
    """The trace through an engine in wall time."""
    params = greedy(int(trace.num_output_tokens.max()), ignore_eos=True)
    with wall_engine(cost, spec, limits, depth=depth) as (engine, clock):
        _send(trace, engine, clock, params)
        run_to_the_end(engine, clock)
        return engine.record({"name": trace.name}), engine


def _send(trace: Trace, engine: Engine[WallTimeRunner], clock: EventClock, params: object) -> None:
    columns = (trace.arrival_ns.tolist(), trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist())
    for index, (arrival_ns, num_prompt, length) in enumerate(zip(*columns, strict=True)):
        prompt = [(index * 31 + j) % 256 for j in range(num_prompt)]
        clock.at(arrival_ns, lambda p=prompt, n=length: engine.submit(p, params, stop_after=n))  # pyright: ignore


@pytest.mark.parametrize(
    ("rule", "depth", "cost"), [*((r, d, COST) for r in RULES for d in (0, 1)), ("mixed", 1, SLOW)]
)
def test_every_step_is_planned_and_ends_as_simulate_says(rule: str, depth: int, cost: ConstantCost) -> None:
    # The trace does not say which blocks the engine's cache would find.
    spec = replace(policy(rule), enable_prefix_caching=False)
    for seed, limits in ((1, LIMITS), (2, TIGHT)):
        trace = trace_of(seed)
        record, _ = served(trace, cost, spec, limits, depth)
        expected = simulate(trace, spec, cost, limits, overlap_depth=depth)
        assert (
            record.array("steps", "plan_digest").tolist() == expected.array("steps", "plan_digest").tolist()
        )
        for column in ("launch_ns", "commit_ns"):
            late = record.array("steps", column) - expected.array("steps", column)
            assert late.min() >= 0
            assert late.max() <= SLACK_NS
        counters = record.header["counters"]
        assert (counters["num_late_steps"], counters["num_cut_steps"]) == (0, 0)
        assert counters["late_ns"] == 0


def test_step_times_are_the_profiles() -> None:
    """Launch to commit is what the measured cost says of the shape, commit to launch its host time."""
    cost, trace = MeasuredCost(tiny_profile()), trace_of(3)
    record, engine = served(trace, cost, "mixed", LIMITS, 0)
    expected = simulate(trace, "mixed", cost, LIMITS)
    for begin, end in (("launch_ns", "commit_ns"), ("schedule_ns", "launch_ns")):
        ours, theirs = ((r.array("steps", end) - r.array("steps", begin)) for r in (record, expected))
        assert np.abs(ours - theirs).max() <= SLACK_NS
    assert record.header["cost"] == cost.describe()
    assert record.header["counters"]["num_extrapolated"] == expected.header["counters"]["num_extrapolated"]
    assert engine.runner.facts.kind == "simulated"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_its_record_retraces_with_stops_aborts_and_shared_prefixes(rule: str, depth: int) -> None:
    with wall_engine(COST, rule, TIGHT, depth=depth) as (engine, clock):
        for index in range(20):
            prompt = [7] * (4 * (index % 5)) + [index % 256] * (1 + index % 9)
            params = greedy(24, stop=["a"], ignore_eos=True, temperature=1.0, seed=index, n=1 + index % 2)
            clock.at(index * 3 * MS, lambda p=prompt, s=params: engine.submit(p, s))
            if index % 4 == 3:
                clock.at(index * 3 * MS + 2 * MS, lambda: engine.abort(max(engine._live, default=0)))
        run_to_the_end(engine, clock)
        record = engine.record({"name": "mixed fates"})
    assert {"stop", "length", "abort"} <= set(record.requests["finish_reason"].to_pylist())
    found = check_decisions(record, rule, check=True)
    assert found.identical, found.first_difference
    assert found.steps_identical == record.steps.num_rows > 20


def test_a_slow_loop_makes_steps_late_and_the_header_says_so() -> None:
    with wall_engine(COST) as (engine, clock):
        wait = engine.runner.wall.wait

        def slow_once() -> None:
            if engine.runner.wall.num_steps == 3:
                clock.now += 50 * MS
            wait()

        engine.runner.wall.wait = slow_once
        engine.submit([1, 2, 3], greedy(8, ignore_eos=True))
        run_to_the_end(engine, clock)
        record = engine.record()
    commits = record.array("steps", "commit_ns").tolist()
    counters = record.header["counters"]
    late_ns = counters["max_late_ns"]
    assert counters["num_late_steps"] == 1
    assert 47 * MS < late_ns == counters["late_ns"] < 50 * MS
    usual = 2 * MS + 100_000 + 300_000
    gaps = [after - before for before, after in pairwise(commits)]
    assert gaps[:2] == gaps[3:5] == [usual] * 2
    assert gaps[2] == usual + late_ns


def test_the_header_does_not_call_it_live() -> None:
    record, engine = served(trace_of(4, 3), COST, "mixed", LIMITS, 0)
    assert record.header["kind"] == "simulated"
    assert record.header["device"]["time"] == "wall"
    assert record.header["cost"]["name"] == "constant"
    assert engine.num_live == 0
    assert not engine.runner._newcomers
    assert not engine.runner._launched
