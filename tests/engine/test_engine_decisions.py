"""Decision identity with the real runner: the simulator, given a live run's record, takes the same decisions."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from engine_models import RULES, engine_of, greedy, ids_of, prompts, scripted, small_limits
from engine_rules import PreemptAt

from pagedserve.engine.engine import Engine
from pagedserve.engine.params import SamplingParams
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Limits, Policy, RequestState, Scheduler, policy
from pagedserve.policy.blocks import PagedAllocator
from pagedserve.validation.decisions import check_decisions, compare_decisions

DEPTHS = (0, 1)
ALLOCATORS = ("paged", "paged+cache", "paged+swap", "paged+cache+swap", "contiguous_max", "contiguous_limit")


def spec_of(rule: str, allocator: str, seed: int = 0) -> Policy:
    allocator, *more = allocator.split("+")
    return policy(
        rule,
        allocator=allocator,
        enable_prefix_caching="cache" in more,
        preemption_mode="swap" if "swap" in more else "recompute",
        watermark=(0.0, 0.05)[seed % 2],
        scheduler_reserve_full_isl=seed % 3 > 0,
    )


def random_params(rng: random.Random) -> SamplingParams:
    """Greedy or hot, some with stop strings that do occur, some with several samples."""
    return SamplingParams(
        temperature=rng.choice([0.0, 2.0]),
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.randint(1, 24),
        stop=rng.sample("abcdefghijklmnopqrstuvwxyz0123456789", 8),
        stop_token_ids=rng.sample(range(256), 4),
        ignore_eos=True,
    )


def live_run(
    spec: Policy,
    seed: int,
    depth: int,
    limits: Limits | None = None,
    wrap: Callable[[Scheduler], None] = lambda scheduler: None,
) -> RunRecord:
    """A real engine under pressure: arrivals in bursts, aborts at any time, stops, refusals."""
    rng = random.Random(seed)
    limits = limits or small_limits(
        max_num_batched_tokens=rng.choice([16, 40]),
        max_num_seqs=rng.choice([3, 8]),
        num_blocks=rng.choice([25, 40]),
        max_num_queued_reqs=rng.choice([None, 6]),
    )
    if spec.preemption_mode == "swap":
        limits = replace(limits, num_cpu_blocks=(4, 40)[seed % 2])
    with engine_of(spec, limits, depth=depth, seed=seed) as engine:
        wrap(engine.scheduler)
        for text in prompts(20, 50 + seed % 2):
            engine.submit(text, random_params(rng), stop_after=rng.choice([None, None, 6]))
            if rng.random() < 0.25:
                engine.abort(rng.randrange(engine.intake._next_id + 1), rng.choice(["abort", "timeout"]))
            while rng.random() < 0.6:
                engine.step()
        while engine.has_work:
            assert engine.step() or not engine.has_work
        return engine.record({"name": "random"})


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("rule", RULES)
def test_the_simulator_takes_the_identical_decisions(rule: str, allocator: str, depth: int) -> None:
    """Every plan, call and ending agrees, on a pool as small as the allocator can bear."""
    seed = RULES.index(rule) + 5 * depth
    limits = small_limits(num_blocks=48) if allocator == "contiguous_max" else None
    spec = spec_of(rule, allocator, seed)
    live = live_run(spec, seed, depth, limits)
    decisions = check_decisions(live, spec, check=True)
    assert decisions.first_difference is None
    assert decisions.steps_identical == len(live.steps) > 20


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "allocator", ["paged", "paged+cache", "paged+swap", "paged+cache+swap", "contiguous_limit"]
)
@pytest.mark.parametrize("rule", RULES)
def test_identical_over_many_workloads(rule: str, allocator: str, depth: int) -> None:
    for seed in range(100, 130):
        spec = spec_of(rule, allocator, seed)
        assert check_decisions(live_run(spec, seed, depth), spec).first_difference is None, f"seed {seed}"


def test_the_workloads_are_hard() -> None:
    """The identity above says little unless the runs preempt, abort, stop, hit, discard and refuse."""
    seen = dict.fromkeys(["abort", "timeout", "stop", "length", "refused"], 0)
    seen |= {"num_preemptions": 0, "num_prefix_hit_tokens": 0, "num_discarded_tokens": 0}
    for seed in range(3, 7):
        record = live_run(spec_of("mixed", "paged+cache", seed), seed, depth=1)
        for reason in record.requests.column("finish_reason").to_pylist():
            seen[reason] += 1
        for column in ("num_preemptions", "num_prefix_hit_tokens", "num_discarded_tokens"):
            seen[column] += sum(record.array("steps", column).tolist())
    assert min(seen.values()) > 1, seen


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_swapping_workloads_swap(depth: int) -> None:
    """Out, in, and not at all where host memory was full: then something is computed again."""
    seen = dict.fromkeys(["num_blocks_swapped_out", "num_blocks_swapped_in", "num_recomputed_tokens"], 0)
    for seed in range(4, 12):
        record = live_run(spec_of("mixed", "paged+swap", seed), seed, depth)
        for column in seen:
            seen[column] += sum(record.array("steps", column).tolist())
    assert min(seen.values()) > 5, seen


@pytest.mark.parametrize("way", ["out_host_blocks", "in_blocks"])
def test_a_copy_to_another_block_is_a_difference(way: str) -> None:
    """What was copied where is compared, also where nothing else differs."""
    spec = spec_of("mixed", "paged+swap", 5)
    live = live_run(spec, 5, depth=1)
    assert live.plans is not None
    rows = live.plans.to_pylist()
    changed = next(row for row in rows if row[way])
    changed[way] = [changed[way][0] + 1, *changed[way][1:]]
    other = replace(live, plans=pa.Table.from_pylist(rows, schema=live.plans.schema))
    found = compare_decisions(other, live)
    assert found.first_difference is not None
    assert found.first_difference.startswith(f"step {changed['step']}: {way}: ")


@pytest.mark.parametrize("depth", DEPTHS)
def test_identical_with_stop_strings_across_blocks(depth: int) -> None:
    """Stops by string at every offset in a block, with generated blocks published and hit by a second turn."""
    spec = policy("vllm_v1")
    texts = ["x" * size + "STOP and more" for size in range(9)]
    with engine_of(spec, small_limits(num_blocks=40), depth=depth) as engine:
        for turn in range(2):
            first = engine.intake._next_id
            with scripted(engine, lambda request, first=first: ids_of(texts[request - first])):
                for text in texts:
                    engine.submit("Go on: " + text[: 6 * turn], greedy(20, stop="STOP"))
                while engine.has_work:
                    engine.step()
        live = engine.record()
    assert live.requests.column("finish_reason").to_pylist().count("stop") > 9
    assert check_decisions(live, spec, check=True).first_difference is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", [False, True])
def test_identical_when_a_chunk_and_a_decode_stop_in_one_step(caches: bool, depth: int) -> None:
    """Blocks must come back in one order, however device and simulator list who stopped."""
    spec = policy("mixed", enable_prefix_caching=caches)
    with engine_of(spec, depth=depth) as engine:
        engine.submit(range(8), greedy(9), stop_after=3)
        engine.step()
        engine.step()
        engine.submit(range(100, 108), greedy(9), stop_after=1 + depth)
        engine.submit(range(50, 90), greedy(9))
        while engine.has_work:
            engine.step()
        live = engine.record()
    ends = live.requests.column("finish_ns").to_pylist()
    assert depth or ends[0] == ends[1], "they did not stop in one step, so nothing was tried"
    assert check_decisions(live, spec, check=True).first_difference is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("count", [1, 3])
def test_identical_with_a_rule_of_ones_own(count: int, depth: int) -> None:
    """A rule from a notebook that preempts, also when that leaves the step empty."""
    for position in (1, 2, 5):
        spec = Policy(batching=PreemptAt(0, position), enable_prefix_caching=True)
        with engine_of(spec, depth=depth) as engine:
            for text in prompts(count, 51):
                engine.submit(text, greedy(8))
            while engine.has_work:
                assert engine.step()
            live = engine.record()
        assert sum(live.array("steps", "num_preemptions").tolist()) == 1
        assert check_decisions(live, spec, check=True).first_difference is None


def pressured(
    seed: int, wrap: Callable[[Scheduler], None] = lambda scheduler: None, **changes: Any
) -> RunRecord:
    """A run of ``PRESSURED`` with these changes, overlapped, on few blocks."""
    return live_run(replace(PRESSURED, **changes), seed, 1, small_limits(num_blocks=25), wrap)


PRESSURED = policy("mixed", watermark=0.0)


class Oldest:
    """A drift to plant: the wrong victim."""

    def pick(self, candidates: Sequence[RequestState], now_ns: int) -> RequestState | None:
        """The first of ``candidates``."""
        return candidates[0]


class FreedEarly(PagedAllocator):
    """A drift to plant: released blocks are free at once, though a step in flight touches them."""

    def release(self, state: RequestState, fence: int | None) -> None:
        """Forget the fence."""
        super().release(state, None)


class LastFreeFirst(PagedAllocator):
    """A drift to plant: the same counts, other blocks."""

    def bind(self, limits: Limits, prefix_caching: bool) -> None:
        """Hand blocks out from the other end."""
        super().bind(limits, prefix_caching)
        self._free.reverse()


@pytest.mark.parametrize(
    "planted",
    [{"victim": Oldest()}, {"allocator": FreedEarly()}, {"allocator": LastFreeFirst()}, {"watermark": 0.3}],
    ids=["victim", "freed early", "other blocks", "watermark"],
)
def test_a_planted_drift_is_seen(planted: dict[str, Any]) -> None:
    """The engine runs a policy that differs a little from the one the simulator is given."""

    def blind(scheduler: Scheduler) -> None:
        scheduler.ledger.granted = mock.Mock()

    for seed in range(3):
        decisions = check_decisions(pressured(seed, blind, **planted), PRESSURED)
        assert decisions.first_difference is not None
        assert decisions.steps_identical < decisions.steps_live
        assert check_decisions(pressured(seed), PRESSURED).first_difference is None


def test_a_planted_stop_is_seen() -> None:
    """An engine that ends a request one token late differs from what its record says."""
    live = pressured(0)
    rows = live.requests.to_pylist()
    victim = next(row for row in rows if row["finish_reason"] == "stop" and row["num_output_tokens"] > 1)
    victim["num_output_tokens"] -= 1
    columns = {name: [row[name] for row in rows] for name in live.requests.schema.names}
    changed = live.requests.from_pydict(columns, schema=live.requests.schema)
    tampered = RunRecord(live.header, live.steps, changed, live.emissions, live.calls, live.plans)
    assert check_decisions(tampered, PRESSURED).first_difference is not None


def test_recording_leaves_the_run_alone() -> None:
    """The record may be asked for while requests run; the engine goes on, and the last record is whole."""

    def finish(engine: Engine) -> RunRecord:
        while engine.has_work:
            engine.step()
        return engine.record()

    spec = policy("vllm_v1")
    with engine_of(spec, depth=1) as engine:
        states = [engine.submit(text, greedy(8))[0] for text in prompts(4, 53)]
        for _ in range(4):
            engine.step()
        early = engine.record()
        assert early.requests.column("finish_reason").to_pylist() == ["unfinished"] * 4
        whole = finish(engine)
    assert [state.finish_reason for state in states] == ["length"] * 4
    assert whole.requests.column("finish_reason").to_pylist() == ["length"] * 4
    assert check_decisions(whole, spec).first_difference is None
