"""Metrics that vLLM has not: host gap, tenants, recomputed and discarded tokens; and times on the engine's clock."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from engine_models import prompts, small_limits
from engine_serving import run
from prometheus_client.parser import text_string_to_metric_families
from server_apps import Running, running

from pagedserve.engine.outputs import Delta
from pagedserve.engine.server.device_clock import DeviceClockState
from pagedserve.engine.server.histograms import KEPT_VALUES, RecentState
from pagedserve.engine.server.meter import FrontCountsState, PromptMeter
from pagedserve.engine.server.pulse import PulseState, _percentiles
from pagedserve.engine.server.tenants import MAX_TENANTS, OTHERS, TenantLabelsState
from pagedserve.metrics.record import RunRecord

COMPLETIONS = "/v1/completions"


async def _samples(served: Running, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of one metric's samples."""
    async with served.client() as http:
        text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return [(s.labels, s.value) for family in families for s in family.samples if s.name == name]


# The host gap.


def test_gaps_begin_with_work_and_end_with_a_launch() -> None:
    clock = DeviceClockState()

    def told() -> tuple[int, int, int]:
        return clock.gap.count, round(clock.gap.total * 1e9), round(clock.busy_s * 1e9)

    clock.has_work(100)  # a request comes to an idle device
    clock.has_work(150)
    clock.launched(160)
    assert told() == (1, 60, 0)
    clock.committed(260, requests_left=True)
    assert told() == (1, 60, 100)
    clock.launched(265)
    clock.committed(365, requests_left=False)  # nothing is left: what follows is no gap
    clock.has_work(900)
    clock.launched(910)
    assert told() == (3, 75, 200)
    clock.launched(920)  # a second step in flight: no gap between them
    clock.committed(950, requests_left=True)
    clock.committed(960, requests_left=True)
    assert told() == (3, 75, 250)
    clock.has_none()  # the policy plans nothing
    clock.has_work(2000)
    clock.launched(2007)
    assert told() == (4, 82, 250)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_host_gap_is_that_of_the_record(depth: int) -> None:
    """All requests are there before the first step, so that every time between two steps is a gap."""

    async def main(served: Running) -> tuple[Any, RunRecord, float]:
        served.gate.close()
        talks = [
            served.talk(COMPLETIONS, {"prompt": list(prompt), "max_tokens": 20, "ignore_eos": True})
            for prompt in prompts(8, 1)
        ]
        await served.until(lambda: len(served.engine._live) == 8)
        served.gate.open()
        await asyncio.gather(*(talk.task for talk in talks))
        await served.at_rest()
        ((_, sum_s),) = await _samples(served, "pagedserve:host_gap_seconds_sum")
        return served.front.backend.stats().counts.device, await served.served.record(), sum_s

    with running("vllm_v1", small_limits(num_blocks=30), depth) as served:
        device, record, sum_s = run(main(served))
    steps = {name: record.steps[name].to_numpy() for name in ("launch_ns", "commit_ns")}
    gaps = steps["launch_ns"][1:] - steps["commit_ns"][:-1]
    calls = record.calls.to_pandas()
    first = steps["launch_ns"][0] - calls["now_ns"][calls["kind"] == "add"].min()
    assert device.gap.count == record.steps.num_rows
    assert device.gap.total == pytest.approx((gaps.sum() + first) / 1e9, rel=1e-9)
    assert sum_s == device.gap.total
    busy_s = (steps["commit_ns"] - steps["launch_ns"]).sum() / 1e9
    assert device.busy_s == pytest.approx(busy_s, rel=1e-9)


# Tenants.


def test_more_tenants_than_labels_are_folded_and_sums_stay() -> None:
    labels = TenantLabelsState()
    first = {f"t{index}": index + 1 for index in range(MAX_TENANTS + 5)}
    running, waiting = labels.fold(first, {"t0": 7})
    assert len(running) == MAX_TENANTS + 1
    assert running.keys() == waiting.keys()
    assert running[OTHERS] == sum(range(MAX_TENANTS + 1, MAX_TENANTS + 6))
    assert sum(running.values()) == sum(first.values())
    assert (waiting["t0"], sum(waiting.values())) == (7, 7)
    (later,) = labels.fold({"t40": 1, "t0": 2, "": 3})
    assert (later["t40"], later["t0"], later[""]) == (1, 2, 3), "they took the places of names that are gone"
    assert (later["t9"], OTHERS in later) == (0, False), "a name keeps its label, at 0"
    assert len(later) == MAX_TENANTS


def test_running_and_waiting_are_told_by_tenant() -> None:
    async def main(served: Running) -> None:
        served.gate.close()
        tenants = ["alice", "bob", "alice", *(f"t{index}" for index in range(40)), ""]
        talks = [
            served.talk(
                COMPLETIONS, {"prompt": [1] * 6, "max_tokens": 30, "ignore_eos": True, "user": tenant}
            )
            for tenant in tenants
        ]
        await served.until(lambda: len(served.engine._live) == len(tenants))
        served.gate.steps(2)
        await served.until(lambda: served.front.backend.stats().counts.num_steps == 2)
        told: dict[str, dict[str, float]] = {}
        for kind in ("running", "waiting"):
            samples = await _samples(served, f"pagedserve:requests_{kind}_by_tenant")
            told[kind] = {labels["tenant"]: value for labels, value in samples}
            ((_, total),) = await _samples(served, f"vllm:num_requests_{kind}")
            assert sum(told[kind].values()) == total
        assert sum(told["running"].values()) == 4
        assert len(told["waiting"]) == MAX_TENANTS + 1
        assert told["waiting"][OTHERS] == len(tenants) - 1 - MAX_TENANTS
        by_reason = await _samples(served, "vllm:num_requests_waiting_by_reason")
        assert {s["reason"]: value for s, value in by_reason} == {"capacity": len(tenants) - 4, "deferred": 0}
        served.gate.open()
        await asyncio.gather(*(talk.task for talk in talks))
        samples = await _samples(served, "pagedserve:requests_running_by_tenant")
        assert {value for _, value in samples} == {0}

    with running(limits=small_limits(max_num_seqs=4)) as served:
        run(main(served))


# Work done twice, and for nothing.


@pytest.mark.parametrize("depth", [0, 1])
def test_recomputed_and_discarded_tokens_are_what_the_plans_did_twice_and_for_nothing(depth: int) -> None:
    """Counted from the plans alone: positions computed again, and samples that became no output token."""

    async def main(served: Running) -> tuple[Any, RunRecord]:
        bodies = [
            {"prompt": list(prompt), "max_tokens": 40, "stop": ["\x07", "e", "\x1f"], "user": "a"}
            for prompt in prompts(30, 4)
        ]
        await asyncio.gather(*(served.complete(**body, seed=3, temperature=1.0) for body in bodies))
        await served.at_rest()
        return served.front.backend.stats().counts, await served.served.record()

    with running("mixed", small_limits(num_blocks=26), depth) as served:
        counts, record = run(main(served))
    assert record.plans is not None
    high, members, recomputed, samples = Counter[int](), dict[int, int](), 0, 0
    known = dict(
        zip(*(record.requests[name].to_pylist() for name in ("request", "num_prompt_tokens")), strict=True)
    )
    for plan in record.plans.to_pylist():
        for request in (*plan["departed"], *plan["preempted"], *plan["left"]):
            members.pop(request, None)
        chunks = zip(plan["chunk_requests"], plan["chunk_starts"], plan["chunk_tokens"], strict=True)
        starts: dict[int, int] = {}
        for request in plan["joined"]:
            members[request] = high[request]
        if plan["num_decodes"]:
            for request in members:
                starts[request] = 1
                high[request] += 1
                known[request] += 1
                samples += 1
        for request, start, tokens in chunks:
            recomputed += max(0, min(high[request], start + tokens) - start)
            high[request] = max(high[request], start + tokens)
            if start + tokens == known[request]:
                known[request] += 1
                samples += 1
    assert counts.num_preemptions > 0, "the pool was not small enough"
    assert counts.num_recomputed_tokens == recomputed > 0
    discarded = samples - sum(record.requests["num_output_tokens"].to_pylist())
    assert counts.num_discarded_tokens == discarded
    assert (discarded > 0) == bool(depth), "only a step that was scheduled ahead computes for nobody"


# Times.


def test_a_first_token_has_the_time_of_its_commit_however_late_it_is_read() -> None:
    async def main(served: Running) -> None:
        served.gate.close()
        talk = served.talk(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "ignore_eos": True})
        await served.until(lambda: served.engine._live)
        (generation,) = served.front.open
        arrival_ns = generation._meters[0]._arrival_ns
        served.gate.open()
        while served.engine._live:
            pass  # the event loop reads nothing meanwhile
        await talk.task
        record = await served.served.record()
        commits = record.steps["commit_ns"].to_pylist()
        counts = served.front.counts
        assert counts.ttft.total == pytest.approx((commits[0] - arrival_ns) / 1e9, rel=1e-12)
        assert counts.e2e.total == pytest.approx((commits[2] - arrival_ns) / 1e9, rel=1e-12)
        assert list(counts.recent_ttft.values) == [(counts.ttft.total, 1)]

    with running() as served:
        run(main(served))


def test_a_delta_without_a_time_is_taken_as_of_now() -> None:
    counts = FrontCountsState()
    meter = PromptMeter(counts, 0, 1)
    meter.accepted(3, 5)
    assert meter.take(Delta(0, 0, (1,), "a"))
    assert meter.take(Delta(0, 0, (2,), "b", time_ns=7_000)) is False
    meter.take(Delta(0, 0, (), "", "abort"))
    assert counts.ttft.total > 0
    assert counts.e2e.total == 7e-6
    assert counts.ended == {"abort": 1}


# What the charts are drawn from.


def test_recent_values_are_the_last_ones() -> None:
    recent = RecentState()
    for value in range(KEPT_VALUES + 10):
        recent.observe(value, 2)
    assert recent.since(KEPT_VALUES + 7) == [(KEPT_VALUES + i, 2) for i in (7, 8, 9)]
    assert recent.since(recent.num_observed) == []
    assert len(recent.since(0)) == KEPT_VALUES


def test_percentiles_weigh_values_by_how_often_they_were_seen() -> None:
    rng = np.random.default_rng(0)
    values = [
        (float(value), int(times))
        for value, times in zip(rng.random(50), rng.integers(1, 9, 50), strict=True)
    ]
    spread = sorted(value for value, times in values for _ in range(times))
    told = _percentiles(values)
    assert told is not None
    for share, value in zip((0.5, 0.95), told, strict=True):
        assert value == round(spread[int(np.ceil(share * len(spread))) - 1], 6)
    assert _percentiles([]) is None


def test_points_tell_of_the_last_seconds_and_of_no_time_in_which_nobody_looked() -> None:
    async def main(served: Running) -> None:
        pulse, ttft = PulseState(), served.front.counts.recent_ttft
        view = served.front.backend.view
        assert pulse.add(await view(), 10.0, 4, ttft)["tps"] is None
        await served.complete(prompt="abc", max_tokens=9)
        point = pulse.add(await view(), 12.0, 4, ttft)
        assert point["tps"] == 4.5
        assert point["itl"][0] > 0
        assert point["ttft"] is not None
        assert 0 < point["gap"] < 1
        assert (point["used"], point["waste"], point["running"]) == (0, None, 0)
        assert pulse.add(await view(), 40.0, 4, ttft)["itl"] is None
        pulse.pause()
        await served.complete(prompt="abc", max_tokens=9)
        assert pulse.add(await view(), 41.0, 4, ttft)["itl"] is None
        assert [each["t"] for each in pulse.history] == [10.0, 12.0, 40.0, 41.0]
        pulse.add(await view(), 400.0, 4, ttft)
        assert [each["t"] for each in pulse.history] == [400.0]

    with running() as served:
        run(main(served))
