"""The same policy objects take the same decisions in a live run and in its replay by `simulate`."""

import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagedserve.engine.loop import EngineLoop
from pagedserve.metrics.header import run_header
from pagedserve.metrics.record import RunRecord, build_table
from pagedserve.metrics.recorder import Recorder
from pagedserve.policy import (
    IllegalPlan,
    Limits,
    Outcome,
    Policy,
    Request,
    RequestState,
    Scheduler,
    StepPlan,
    policy,
)
from pagedserve.policy.blocks import PagedAllocator
from pagedserve.simulator.simulate import simulate
from pagedserve.validation.decisions import Decisions, check_decisions, compare_decisions

ALLOCATORS = ("paged", "paged+cache", "contiguous_max", "contiguous_limit")
RULES = ("serial", "static", "prefill_first", "mixed", "vllm_v1")


class FakeDevice:
    """A runner with random step times and random stops, and the clock that its time passes on.

    Half of the steps that could be launched before the one before is waited for are.
    """

    def __init__(self, rng: random.Random, stop_share: float) -> None:
        self.now_ns = 0
        self._rng = rng
        self._stop_share = stop_share
        self._launched: deque[tuple[StepPlan, int]] = deque()

    def clock(self) -> int:
        return self.now_ns

    def can_launch_ahead(self, plan: StepPlan) -> bool:
        assert self._launched, "nothing is in flight, so there is nothing to be ahead of"
        return self._rng.random() < 0.5

    def launch(self, plan: StepPlan) -> None:
        self.now_ns += self._rng.randrange(3)
        begin_ns = max([self.now_ns, *(done_ns for _, done_ns in self._launched)])
        self._launched.append((plan, begin_ns + self._rng.randrange(1, 1000)))
        assert len(self._launched) <= 2

    def wait(self) -> Sequence[Outcome]:
        plan, done_ns = self._launched.popleft()
        self.now_ns = max(self.now_ns, done_ns)
        sampled = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        keys: dict[int, list[Hashable]] = {}
        for request, index in plan.filled:
            keys.setdefault(request, []).append(("generated", request, index))
        stops = {request for request in sampled if self._rng.random() < self._stop_share}
        return [
            Outcome(r, int(r in sampled), "stop" if r in stops else None, tuple(keys.get(r, ())))
            for r in sorted(stops.union(keys))
        ]


def random_request(rng: random.Random, number: int, arrival_ns: int, block_size: int, cache: bool) -> Request:
    prompt = rng.randint(1, 90)
    group = rng.randrange(3)
    keys = tuple((group, i) if i < 4 else (number, i) for i in range(prompt // block_size)) if cache else None
    return Request(number, arrival_ns, prompt, rng.randint(1, 50), keys)


def live_run(
    spec: Policy,
    seed: int,
    depth: int,
    num_requests: int = 40,
    wrap: Callable[[Scheduler], None] | None = None,
) -> RunRecord:
    """A small engine under memory pressure: random arrivals in bursts, aborts, stops, sizes."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    limits = Limits(
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_num_seqs=rng.choice([2, 5, 8]),
        max_model_len=128,
        block_size=block_size,
        num_blocks=rng.choice([136, 200, 300]) // block_size,
        max_num_queued_reqs=rng.choice([None, 20]),
    )
    scheduler = Scheduler(spec, limits, depth)
    if wrap is not None:
        wrap(scheduler)
    device = FakeDevice(rng, stop_share=0.02)
    recorder = Recorder(scheduler, keep_plans=True)
    loop = EngineLoop(scheduler, device, recorder, device.clock)
    number = 0
    while number < num_requests or loop.has_work:
        while number < num_requests and rng.random() < 0.5:
            loop.add(random_request(rng, number, device.now_ns, block_size, spec.enable_prefix_caching))
            number += 1
        if scheduler.states and rng.random() < 0.05:
            loop.abort(rng.choice([*scheduler.states, 10_000]))
        if not loop.step():
            device.now_ns += rng.randrange(1, 500)
        scheduler.check()
    return recorder.record(run_header("live", scheduler, trace={}))


def spec_of(rule: str, allocator: str, seed: int) -> Policy:
    cache = allocator == "paged+cache"
    return policy(
        rule,
        allocator="paged" if cache else allocator,
        enable_prefix_caching=cache,
        watermark=(0.0, 0.05)[seed % 2],
        scheduler_reserve_full_isl=seed % 3 > 0,
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("rule", RULES)
def test_replay_takes_the_identical_decisions(rule: str, allocator: str, depth: int) -> None:
    for seed in range(8):
        spec = spec_of(rule, allocator, seed)
        live = live_run(spec, seed, depth)
        decisions = check_decisions(live, spec)
        assert decisions == Decisions(len(live.steps), len(live.steps), None), f"seed {seed}"


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("rule", RULES)
def test_replay_takes_the_identical_decisions_over_many_workloads(
    rule: str, allocator: str, depth: int
) -> None:
    for seed in range(100, 300):
        spec = spec_of(rule, allocator, seed)
        assert check_decisions(live_run(spec, seed, depth, 60), spec).identical, f"seed {seed}"


def test_workloads_preempt_abort_stop_hit_and_refuse() -> None:
    """The identity above says little unless the workloads are hard."""
    seen = {"preempted": 0, "abort": 0, "stop": 0, "length": 0, "refused": 0, "hits": 0, "discarded": 0}
    for seed in range(8):
        record = live_run(spec_of("mixed", "paged+cache", seed), seed, depth=1)
        reasons = record.requests.column("finish_reason").to_pylist()
        for reason in ("abort", "stop", "length", "refused"):
            seen[reason] += reasons.count(reason)
        seen["preempted"] += sum(record.array("steps", "num_preemptions").tolist())
        seen["hits"] += sum(record.array("steps", "num_prefix_hit_tokens").tolist())
        seen["discarded"] += sum(record.array("steps", "num_discarded_tokens").tolist())
    assert min(seen.values()) > 3, seen


class Oldest:
    """A drift to plant: the wrong victim."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        return candidates[0]


def pressured_runs(wrap: Callable[[Scheduler], None] | None = None) -> list[tuple[Policy, RunRecord]]:
    """Runs with at least four preemptions."""
    runs = []
    for seed in range(24):
        spec = spec_of("mixed", "paged", seed)
        record = live_run(spec, seed, depth=1, wrap=wrap)
        if sum(record.array("steps", "num_preemptions").tolist()) >= 4:
            runs.append((spec, record))
    assert len(runs) >= 4
    return runs


def test_another_victim_is_seen() -> None:
    for spec, live in pressured_runs():
        decisions = check_decisions(live, replace(spec, victim=Oldest()))
        assert not decisions.identical
        assert decisions.steps_identical < decisions.steps_live


def test_swapped_intake_is_seen() -> None:
    for spec, live in pressured_runs():
        calls = live.calls.to_pylist()
        one, two = [i for i, call in enumerate(calls) if call["kind"] == "add"][4:6]
        calls[one]["subject"], calls[two]["subject"] = calls[two]["subject"], calls[one]["subject"]
        decisions = compare_decisions(live, simulate(_with_calls(live, calls), spec))
        assert not decisions.identical


class FreedEarly(PagedAllocator):
    """A drift to plant: released blocks are free at once, though a step in flight touches them."""

    def release(self, state: RequestState, fence: int | None) -> None:
        super().release(state, None)


def test_a_block_freed_one_step_early_is_seen() -> None:
    """An engine that frees early differs from its replay, provided the ledger is blind to it."""

    def blind(scheduler: Scheduler) -> None:
        def granted(state: RequestState, num_tokens: int, block_size: int, new: Collection[int]) -> None:
            pass

        scheduler.ledger.granted = granted

    seen = 0
    for seed in range(24):
        spec = spec_of("mixed", "paged", seed)
        early = live_run(replace(spec, allocator=FreedEarly()), seed, depth=1, wrap=blind)
        seen += not check_decisions(early, spec).identical
    assert seen >= 12


def test_a_block_freed_one_step_early_is_refused() -> None:
    def pressured() -> None:
        for seed in range(24):
            live_run(replace(spec_of("mixed", "paged", seed), allocator=FreedEarly()), seed, depth=1)

    with pytest.raises(
        IllegalPlan, match=r"FreedEarly gave request \d+ blocks .* touched by steps in flight \[\d"
    ):
        pressured()


def _with_calls(record: RunRecord, calls: list[dict[str, Any]]) -> RunRecord:
    columns = {name: [call[name] for call in calls] for name in ("kind", "subject", "now_ns")}
    return RunRecord(
        record.header,
        record.steps,
        record.requests,
        record.emissions,
        build_table("calls", columns),
        record.plans,
    )
