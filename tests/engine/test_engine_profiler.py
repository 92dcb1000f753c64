"""The profiler measures what a scheduler would plan, where the engine's loop would measure it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import engine_of, greedy, run_all, small_limits, tiny_model, vocabulary

from pagedserve.engine import profiler
from pagedserve.engine.graphs import DecodeGraphs
from pagedserve.engine.profile_grid import HOST_PROMPT, HOST_STEPS, Grid, Point
from pagedserve.engine.profiler import StepBench, profile_engine
from pagedserve.engine.runner import ModelRunner
from pagedserve.metrics.profile import Profile
from pagedserve.policy import Limits, Policy, Request, Scheduler, Step, StepPlan, StepShape

LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=96, block_size=4, num_blocks=128)
GRID = Grid((1, 8, 32), (0, 20), (1, 3, 6), (4, 40), (16,), (2,), (1, 4))
POINTS, ROWS = GRID.fitting(LIMITS)


class Staged:
    """Chunks of the sizes told, request by request, behind the decodes if those are wanted."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.decodes = False

    def compose(self, step: Step) -> None:
        """Do what was told."""
        if self.decodes:
            step.decode()
        for state in step.prefilling():
            step.chunk(state, self.sizes[state.id])
        while (state := step.next_waiting()) is not None:
            assert step.admit(state, num_tokens=self.sizes[state.id])


def planned_by_a_scheduler(point: Point) -> StepPlan:
    """Bring a scheduler to where its next step is the point's: contexts in one step, then the step."""
    wide = Limits(max_num_batched_tokens=4096, max_num_seqs=8, max_model_len=96, block_size=4, num_blocks=512)
    scheduler = Scheduler(Policy(batching=Staged()), wide)
    rule: Any = scheduler.batching
    # A chunk that is not to sample leaves a token of its prompt.
    lengths = [tokens + context + (not point.chunks_sample) for tokens, context in point.chunks]
    contexts = [context for _, context in point.chunks]
    rule.sizes = dict(enumerate([*contexts, *point.decodes]))
    for number, length in enumerate([*lengths, *point.decodes]):
        if rule.sizes[number]:
            scheduler.add(Request(number, 0, length, 8), 0)
    before = scheduler.schedule(0)
    if before.step is not None:
        scheduler.commit(before.step, (), 1)
    for number, length in enumerate(lengths):
        rule.sizes[number] = point.chunks[number][0]
        if not contexts[number]:
            scheduler.add(Request(number, 1, length, 8), 1)
    rule.decodes = True
    return scheduler.schedule(2)


def shape_of_batch(batch: Any, num_chunks: int, chunks_sample: bool) -> StepShape:
    """A step's shape, worked out from what the model is given."""
    contexts = batch.context_lens.tolist()
    counts = np.diff(batch.query_start.numpy()).tolist()
    decodes = contexts[num_chunks:]
    assert set(counts[num_chunks:]) <= {1}
    return StepShape(
        tuple(zip(counts[:num_chunks], contexts[:num_chunks], strict=True)),
        len(decodes),
        sum(decodes),
        max(decodes, default=0),
        sum(context**2 for context in decodes),
        len(contexts) if chunks_sample else len(decodes),
    )


class Watched:
    """A bench on the tiny model that keeps every plan launched and every batch computed."""

    def __init__(self, limits: Limits) -> None:
        self.runner = ModelRunner(tiny_model(), limits, vocabulary().size, False, False)
        self.bench = StepBench(self.runner, vocabulary(), limits)
        self.plans: list[StepPlan] = []
        self.batches: list[Any] = []
        lay_out = self.runner.table.lay_out

        def watch(plan: StepPlan) -> Any:
            self.plans.append(plan)
            inputs = lay_out(plan)
            self.batches.append(inputs.batch)
            return inputs

        self.runner.table.lay_out = watch  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_step_is_what_a_scheduler_would_plan_and_what_the_model_computes(point: Point) -> None:
    watched, planned = Watched(LIMITS), planned_by_a_scheduler(point)
    watched.bench.measure(point)
    (plan,), (batch,) = watched.plans, watched.batches
    assert (
        plan.shape
        == point.shape
        == planned.shape
        == shape_of_batch(batch, len(point.chunks), point.chunks_sample)
    )
    assert [chunk[1:] for chunk in plan.chunks] == [chunk[1:] for chunk in planned.chunks]
    assert len(plan.decodes) == len(planned.decodes) == len(plan.joined)
    # As many blocks as a scheduler holds for the same tokens, each owned by one request and in the pool.
    blocks = [block for _, own in plan.new_blocks for block in own]
    known = [*(tokens + context for tokens, context in point.chunks), *(c + 1 for c in point.decodes)]
    assert [len(own) for _, own in plan.new_blocks] == [-(-length // LIMITS.block_size) for length in known]
    assert len(set(blocks)) == len(blocks)
    assert set(blocks) <= set(range(LIMITS.num_blocks))


def test_steps_follow_each_other_as_the_worker_expects() -> None:
    watched = Watched(LIMITS)
    for point in POINTS:
        watched.bench.measure(point)
    for last, plan in zip(watched.plans, watched.plans[1:], strict=False):
        assert plan.step == (last.step or 0) + 1
        assert set(plan.departed) == {request.id for request in last.new_requests}
        assert plan.left == last.decodes
    assert len(watched.runner.table.sequences) == len(watched.plans[-1].new_requests)
    assert len(watched.runner.table._free_seats) == LIMITS.max_num_seqs - len(watched.plans[-1].new_requests)
    assert not watched.runner._newcomers


def test_the_time_is_from_the_end_of_launch_to_the_end_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `EngineLoop` stamps launch_ns behind launch and commit_ns behind wait."""
    watched, clock = Watched(LIMITS), [0]
    launch, wait = watched.runner.launch, watched.runner.wait
    monkeypatch.setattr(profiler.time, "perf_counter_ns", lambda: clock[0])

    def slow_launch(plan: StepPlan) -> None:
        launch(plan)
        clock[0] += 1000

    def slow_wait() -> Sequence[Any]:
        clock[0] += 7
        return wait()

    monkeypatch.setattr(watched.runner, "launch", slow_launch)
    monkeypatch.setattr(watched.runner, "wait", slow_wait)
    assert [watched.bench.measure(point) for point in POINTS[:3]] == [7, 7, 7]


@pytest.mark.parametrize("changes", [{"max_model_len": 24}, {"num_blocks": 5}, {"max_num_batched_tokens": 7}])
def test_limits_without_room_are_refused_with_their_numbers(changes: dict[str, int]) -> None:
    tight = small_limits(max_num_seqs=4, **changes)
    assert HOST_PROMPT + HOST_STEPS == 24
    (name, value), *_ = changes.items()
    said = f"{value} KV blocks" if name == "num_blocks" else f"{name} {value}"
    with engine_of(limits=tight) as engine, pytest.raises(ValueError, match=f"{said}.*raise the limits"):
        profile_engine(engine, "tiny", GRID)


def test_a_profile_of_a_real_engine() -> None:
    seen: list[tuple[int, int]] = []
    prompt = list(range(1, 9))
    with engine_of(limits=LIMITS) as engine:
        before = run_all(engine, [prompt], greedy(8))[0].token_ids
        found = profile_engine(
            engine, "tiny", GRID, num_repeats=2, progress=lambda done, total: seen.append((done, total))
        )
        assert not engine.has_work
        assert run_all(engine, [prompt], greedy(8))[0].token_ids == before, "the engine goes on as before"
    assert [point.shape for point in found.steps] == [point.shape for point in POINTS]
    assert [point.kind for point in found.steps] == [point.kind for point in POINTS]
    assert {point.num_repeats for point in found.steps} == {2}
    assert [(point.num_rows, point.num_repeats) for point in found.host] == [(1, 28), (4, 28)]
    assert all(0 < point.p20_ns <= point.p50_ns <= point.p80_ns for point in (*found.steps, *found.host))
    cases = [(way, count) for way in ("out", "in") for count in (1, 4, 16, 64)]  # there are no 256 blocks
    assert [(point.direction, point.num_blocks) for point in found.swaps] == cases
    assert all(0 < point.p20_ns <= point.p50_ns <= point.p80_ns for point in found.swaps)
    total = 3 * (len(POINTS) + 2 + len(cases))
    assert seen == [(done, total) for done in range(1, total + 1)]
    own = found.provenance
    assert (own["model"], own["dtype"], own["attention"], own["device"]) == ("tiny", "float32", "cpu", "cpu")
    assert own["geometry"]["hidden_size"] == 32
    assert own["limits"]["num_blocks"] == 128
    assert (own["grid"]["chunk_tokens"], own["num_repeats"], own["seed"]) == ([1, 8, 32], 2, 0)
    assert {"torch", "pagedserve", "python"} == set(own["versions"])
    assert own["device_name"]


def test_a_profile_of_a_real_engine_survives_its_file(tmp_path: Any) -> None:
    small = Grid((8,), (0,), (1,), (4,), (8,), (), (1,))
    with engine_of(limits=LIMITS) as engine:
        found = profile_engine(engine, "tiny", small, num_repeats=1)
    found.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == found
    assert loaded.sha256() == found.sha256()


def test_rounds_cover_everything_each_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    measure = StepBench.measure

    def watch(self: StepBench, point: Point) -> int:
        measured.append(point)
        measure(self, point)
        return len(measured)

    def gaps(_: Any, num_rows: int) -> list[int]:
        measured.append(num_rows)
        return [len(measured)]

    monkeypatch.setattr(StepBench, "measure", watch)
    monkeypatch.setattr(profiler, "_host_gaps", gaps)
    everything: Counter[Any] = Counter([*POINTS, *ROWS])
    with engine_of(limits=LIMITS) as engine:
        found = profile_engine(engine, "tiny", GRID, num_repeats=3)
    size = len(POINTS) + len(ROWS)
    rounds = [measured[start : start + size] for start in range(0, len(measured), size)]
    assert len(rounds) == 4
    assert all(Counter(one) == everything for one in rounds)
    assert len({tuple(map(str, one)) for one in rounds}) == 4
    # The first round only warms up: no quantile is below its end.
    assert min(point.p20_ns for point in (*found.steps, *found.host)) > size


def test_gaps_of_the_host_are_those_between_decode_steps() -> None:
    with engine_of(limits=LIMITS) as engine:
        for rows in (1, 3):
            gaps = profiler._host_gaps(engine, rows)
            assert len(gaps) == HOST_STEPS - 2
            assert min(gaps) > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_decodes_are_measured_as_the_engine_runs_them() -> None:
    """On its graphs where it has some, steps and gaps of the host alike; a profile says which."""
    replayed: list[int] = []

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            out = run()
            replayed.append(len(out))
            return out

        return replay

    grid = Grid((8,), (0,), (1, 3), (4,), (16,), (2,), (2,))
    limits = replace(LIMITS, max_num_seqs=4)
    with engine_of(limits=limits, model=tiny_model("llama", "triton")) as engine:
        without = profile_engine(engine, "tiny", grid, num_repeats=1)
        assert not replayed
        runner = engine.runner
        graphs = DecodeGraphs(runner.model, runner.kv, (1, 2, 4), limits.max_model_len, capture)
        assert len(list(graphs.record())) == 3
        runner.graphs = graphs
        found = profile_engine(engine, "tiny", grid, num_repeats=1)
    assert (without.provenance["has_graphs"], found.provenance["has_graphs"]) == (False, True)
    decodes = [point.shape.num_decodes for point in found.steps if point.kind == "decode"]
    assert len(decodes) > 1
    expected = Counter(2 * [{1: 1, 3: 4}[count] for count in decodes])  # a warm-up and one repeat
    expected[2] += 2 * (HOST_STEPS - 1)  # the first of its tokens comes with the prompts
    assert Counter(replayed) == expected


def test_a_busy_engine_and_no_repeats_are_refused() -> None:
    with engine_of(limits=LIMITS) as engine:
        with pytest.raises(ValueError, match="num_repeats is 0; it must be at least 1"):
            profile_engine(engine, "tiny", GRID, num_repeats=0)
        engine.submit([1, 2], greedy(2))
        with pytest.raises(ValueError, match="1 live requests; profile an idle engine"):
            profile_engine(engine, "tiny", GRID)
