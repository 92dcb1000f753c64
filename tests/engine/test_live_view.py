"""The look into the engine: owners as the block tables have them, sums that are the pool, and no text."""

import json
from collections import Counter
from dataclasses import asdict, fields

import numpy as np
import pytest
from engine_models import engine_of, greedy, prompts, small_limits
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.engine.engine import Engine
from pagedserve.engine.server.engine_view import (
    CACHED,
    DECODE,
    FIRST_OWNED,
    FREE,
    MOST_WAITING,
    PREEMPTED,
    PREFILL,
    QUARANTINED,
    RECOMPUTE,
    WAITING,
    EngineView,
    SequenceView,
    glimpse,
)
from pagedserve.engine.server.live import changes, runs
from pagedserve.engine.server.observer import EngineCountsState
from pagedserve.policy import policy

COUNTS = EngineCountsState()


def _view(engine: Engine) -> EngineView:
    return glimpse(engine.scheduler, COUNTS, engine.loop.clock()).view()


def _check(engine: Engine, view: EngineView) -> Counter[str]:
    """Compare with the block tables and the allocator's own counts; what was seen, for `assert`s on coverage."""
    scheduler, pool, codes = engine.scheduler, view.pool, view.blocks.tolist()
    allocator = scheduler.allocator
    assert pool.owned + pool.quarantined + pool.cached + pool.free == len(codes) == engine.limits.num_blocks
    assert pool.owned + pool.quarantined == engine.limits.num_blocks - allocator.num_free_blocks
    assert (pool.cached, pool.quarantined) == (allocator.num_cached_blocks, allocator.num_quarantined_blocks)
    tables = {state.id: state.block_table for state in scheduler.running.values()}
    holders = {block: [r for r, table in tables.items() if block in table] for block in range(len(codes))}
    for block, code in enumerate(codes):
        if holders[block]:
            expected = FIRST_OWNED + 2 * holders[block][0] + (len(holders[block]) > 1)
            assert code == expected, f"block {block} is held by {holders[block]}"
        else:
            assert code in (FREE, CACHED, QUARANTINED)
    assert pool.shared == sum(len(each) > 1 for each in holders.values())
    assert view.num_wasted_slots == scheduler.num_wasted_slots
    assert [each.id for each in view.running] == list(tables)
    assert [each.num_blocks for each in view.running] == [len(table) for table in tables.values()]
    assert view.num_waiting == len(scheduler.waiting)
    for each in view.running:
        state = scheduler.states[each.id]
        told = (each.num_computed_tokens, each.num_output_tokens, each.max_output_tokens)
        assert told == (state.num_computed_tokens, state.num_output_tokens, state.limit)
    seen = Counter({"shared": pool.shared, "quarantined": pool.quarantined, "cached": pool.cached})
    return seen + Counter(f"phase {each.phase}" for each in (*view.running, *view.waiting))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("allocator", ["paged", "contiguous_limit", "contiguous_max"])
def test_owners_are_those_of_the_block_tables_after_every_step(allocator: str, depth: int) -> None:
    paged = allocator == "paged"
    spec = policy("mixed", allocator=allocator, enable_prefix_caching=paged, watermark=0.0)
    texts, seen = prompts(24, 5, 24), Counter[str]()
    with engine_of(spec, small_limits(num_blocks=30, max_num_batched_tokens=16), depth=depth) as engine:
        for index, text in enumerate(texts):
            prompt = (*range(9), *text) if index % 2 else text
            # Who stops under way leaves blocks that the step in flight still touches.
            engine.submit(prompt, greedy(30), tenant=f"t{index % 3}", stop_after=11 if index % 3 else None)
        seen += _check(engine, _view(engine))
        while engine.has_work:
            engine.step()
            if engine.scheduler.next_step == 20:
                engine.abort(next(iter(engine.scheduler.states)))
            seen += _check(engine, _view(engine))
        assert _view(engine).pool.owned == 0
    assert seen[f"phase {WAITING}"]
    assert seen[f"phase {DECODE}"]
    if paged:
        wanted = {"shared", "cached", f"phase {PREEMPTED}", f"phase {RECOMPUTE}"}
        assert not wanted - seen.keys()
    if depth:
        assert seen["quarantined"]


def test_a_look_tells_phases_and_changes_nothing() -> None:
    with engine_of("vllm_v1", small_limits(max_num_batched_tokens=8, max_num_seqs=2)) as engine:
        ids = [
            engine.submit([i + 1] * 20, greedy(5), tenant="x" * 100)[0].sequence.request.id for i in range(3)
        ]
        engine.step()
        before = engine.scheduler.allocator.num_releases
        view = _view(engine)
        assert [each.phase for each in view.running] == [PREFILL]
        assert [each.phase for each in view.waiting] == [WAITING] * 2
        assert (view.running[0].num_computed_tokens, view.running[0].num_prompt_tokens) == (8, 20)
        assert view.running[0].tenant == "x" * 63 + "…"
        assert view.running[0].arrival_ns <= view.taken_ns
        while engine.scheduler.states[ids[0]].num_output_tokens < 2:
            engine.step()
        assert _view(engine).running[0].phase == DECODE
        assert engine.scheduler.allocator.num_releases >= before
        engine.abort_all()
        while engine.has_work:
            engine.step()
        assert _view(engine).running == ()


def test_of_many_waiting_the_first_are_told_and_all_are_counted() -> None:
    with engine_of("mixed", small_limits(max_num_seqs=1)) as engine:
        for _ in range(MOST_WAITING + 10):
            engine.submit([1], greedy(3))
        engine.step()
        view = _view(engine)
        assert view.num_waiting == MOST_WAITING + 9
        assert [each.id for each in view.waiting] == list(range(1, MOST_WAITING + 1))
        engine.abort_all()
        while engine.has_work:
            engine.step()


def test_a_look_has_numbers_and_tenants_only() -> None:
    """Nothing in it could hold a request's text or token ids."""
    secret = list(b"a secret prompt")
    with engine_of("vllm_v1") as engine:
        engine.submit(secret, greedy(9), tenant="alice")
        for _ in range(4):
            engine.step()
        view = _view(engine)
        assert {field.name: field.type for field in fields(SequenceView) if field.type != "int"} == {
            "tenant": "str"
        }
        assert view.blocks.dtype == np.int64
        told = json.dumps([asdict(each) for each in view.running])
        assert json.dumps(secret[:3])[1:-1] not in told
        engine.abort_all()
        while engine.has_work:
            engine.step()


CODES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 17, 10**9]), min_size=1, max_size=60)


@given(CODES, st.data())
def test_runs_and_changes_rebuild_the_pool(codes: list[int], data: st.DataObject) -> None:
    whole = np.array(codes, dtype=np.int64)
    rebuilt = [code for code, length in zip(*[iter(runs(whole))] * 2, strict=True) for _ in range(length)]
    assert rebuilt == codes
    assert len(runs(whole)) == 2 * (1 + np.count_nonzero(np.diff(whole)))
    later = data.draw(st.lists(CODES.flatmap(st.sampled_from), min_size=len(codes), max_size=len(codes)))
    for first, length, code in zip(*[iter(changes(whole, np.array(later, dtype=np.int64)))] * 3, strict=True):
        rebuilt[first : first + length] = [code] * length
    assert rebuilt == later
