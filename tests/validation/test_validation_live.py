"""A live replay serves the trace it was given, and its record is one that the simulator can retrace."""

import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from validation_engines import LIMITS, idle_engine, tiny_profile

from pagedserve.metrics.profile import Profile
from pagedserve.metrics.summary import summarize
from pagedserve.policy import IllegalPlan, Step, policy
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.traces.sample_files import sample
from pagedserve.traces.trace import Trace
from pagedserve.traces.transforms import first
from pagedserve.validation.decisions import check_decisions
from pagedserve.validation.planning import Setting, plan_traffic
from pagedserve.validation.policies import shared_traffic, validated
from pagedserve.validation.profiles import check_profile
from pagedserve.validation.prompts import TracePrompts
from pagedserve.validation.send_lag import SendLag
from pagedserve.validation.validate import LiveBench, validate

TRACE = Trace.of(
    "small",
    [i * 3_000_000 for i in range(12)],
    [5 + 7 * (i % 5) for i in range(12)],
    [1 + i for i in range(12)],
)


@pytest.mark.parametrize("name", ["serial", "static", "prefill_first", "mixed", "vllm_v1"])
@pytest.mark.parametrize("depth", [0, 1])
def test_every_request_is_served_to_its_true_length_and_retraced(name: str, depth: int):
    setting = Setting(policy(name), LIMITS, depth)
    with idle_engine() as idle:
        record = LiveBench(idle).replay(TRACE, setting)
    requests = record.requests.to_pydict()
    assert requests["num_output_tokens"] == TRACE.num_output_tokens.tolist()
    assert requests["num_prompt_tokens"] == TRACE.num_prompt_tokens.tolist()
    # The scheduler knows one limit for all: every stop but the longest's is a surprise.
    assert set(requests["max_tokens"]) == {12}
    assert requests["finish_reason"] == ["stop"] * 11 + [requests["finish_reason"][11]]
    found = check_decisions(record, setting.policy)
    assert found.identical, found.first_difference


def test_requests_are_due_at_their_arrivals_and_never_sent_early():
    with idle_engine() as idle:
        record = LiveBench(idle).replay(TRACE, Setting(policy("mixed"), LIMITS))
    due = record.array("requests", "due_ns")
    np.testing.assert_array_equal(due - due[0], TRACE.arrival_ns)
    assert (record.array("requests", "arrival_ns") >= due).all()
    lag = SendLag.of(record)
    assert 0 <= lag.p50_s <= lag.max_s


def test_a_bench_starts_every_run_with_an_empty_prefix_cache():
    trace = Trace.of("same", [0, 1], [40, 40], [2, 2])
    setting = Setting(policy("vllm_v1"), LIMITS)
    with idle_engine() as idle:
        bench = LiveBench(idle)
        hits = [summarize(bench.replay(trace, setting)).prefix_hit_rate for _ in range(2)]
    assert hits == [0.0, 0.0]


def test_shared_blocks_hit_alike_live_and_simulated():
    trace = first(sample("shared_prefix_200"), 20)
    setting = Setting(policy("vllm_v1"), LIMITS)
    cost = MeasuredCost(tiny_profile())
    traffic = plan_traffic(trace, setting, cost, fit=True, run_s=1.5)
    with idle_engine() as idle:
        live = LiveBench(idle).replay(traffic.trace, setting)
    simulated = setting.simulated(traffic.trace, cost)
    hits = [record.array("requests", "num_prefix_hit_tokens").sum() for record in (live, simulated)]
    assert min(hits) > 0
    assert check_decisions(live, setting.policy).identical


def test_validation_compares_and_says_how(tmp_path):
    setting = Setting(policy("mixed"), LIMITS)
    with idle_engine() as idle:
        cost = MeasuredCost(tiny_profile())
        traffic = plan_traffic(TRACE, setting, cost, rate=200.0, length_scale=1.0)
        labels: list[str] = []
        found = validate(
            LiveBench(idle),
            traffic,
            setting,
            tiny_profile(),
            repeats=2,
            progress=labels.append,  # pyright: ignore
        )
    assert labels == ["live run 1 of 2", "live run 2 of 2"]
    assert found.decisions.identical
    assert found.decisions.steps_live == sum(record.steps.num_rows for record in found.live)
    told = found.as_dict()
    assert set(told) == {"settings", "metrics", "decisions"}
    assert told["settings"]["profile_sha256"] == tiny_profile().sha256()
    row = told["metrics"]["num_running_peak"]
    assert set(row) == {"live", "simulated", "error_pct", "live_repeat_spread_pct"}
    lives = [summarize(record).ttft_p50_s for record in found.live]
    assert told["metrics"]["ttft_p50_s"]["live"] == pytest.approx(sum(lives) / 2)
    spread = 100 * (max(lives) - min(lives)) / (sum(lives) / 2)
    assert told["metrics"]["ttft_p50_s"]["live_repeat_spread_pct"] == pytest.approx(spread)


def test_the_same_requests_go_to_every_policy():
    policies = {name: policy(name) for name in ("serial", "mixed")}
    setting = Setting(policies["mixed"], LIMITS)
    with idle_engine() as idle:
        traffic = shared_traffic(TRACE, policies, "mixed", setting, tiny_profile(), load=0.8, run_s=0.2)
        found = dict(validated(LiveBench(idle), policies, traffic, setting, tiny_profile()))
    assert list(found) == ["serial", "mixed"]
    assert len({each.settings["trace_sha256"] for each in found.values()}) == 1
    assert found["serial"].table.at["num_running_peak", "live"] == 1
    assert all(each.decisions.identical for each in found.values())


def test_an_engine_that_served_before_is_refused():
    prompts = TracePrompts(TRACE, 256)
    from pagedserve.validation.live import replay

    with idle_engine() as engine:
        replay(engine, TRACE[:1], prompts[:1])
        with pytest.raises(ValueError, match="replay on a fresh engine"):
            replay(engine, TRACE[:1], prompts[:1])


def test_what_can_never_run_is_refused_before_anything_is_sent():
    with idle_engine() as idle:
        bench, setting = LiveBench(idle), Setting(policy("mixed"), LIMITS)
        with pytest.raises(ValueError, match=r"300.*shorten the trace's lengths"):
            bench.replay(Trace.of("long", [0, 0], [5, 300], [2, 2]), setting)
        with pytest.raises(ValueError, match="250 prompt and 20 output tokens"):
            bench.replay(Trace.of("long", [0], [250], [20]), setting)
        with pytest.raises(ValueError, match="they must be the same"):
            bench.engine(replace(setting, limits=replace(LIMITS, num_blocks=7)))


def test_a_pool_of_three_blocks_is_warmed_up_within_it():
    small = replace(LIMITS, num_blocks=3)
    with idle_engine(small) as idle:
        bench = LiveBench(idle)
        bench.warm_up()
        record = bench.replay(Trace.of("one", [0], [6], [3]), Setting(policy("mixed"), small))
    assert record.requests.column("num_output_tokens").to_pylist() == [3]


def test_prompts_of_another_length_are_refused():
    from pagedserve.validation.live import replay

    with (
        idle_engine() as engine,
        pytest.raises(ValueError, match=r"prompts\[1\] has 3 tokens; the trace says 12"),
    ):
        replay(engine, TRACE[:2], [[1] * 5, [1] * 3])


class NeverSchedules:
    """Leaves everything waiting, and names no time."""

    def compose(self, step: Step) -> None:
        return None


def test_a_policy_that_leaves_requests_waiting_for_ever_is_told():
    stuck = policy("mixed", batching=NeverSchedules())
    with idle_engine() as idle, pytest.raises(IllegalPlan, match="wait for ever"):
        LiveBench(idle).replay(TRACE[:2], Setting(stuck, LIMITS))


def test_ctrl_c_ends_a_replay_and_its_sender():
    late = Trace.of("late", [0, 60_000_000_000], [5, 5], [2, 2])
    timer = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    with idle_engine() as idle:
        bench = LiveBench(idle)
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            bench.replay(late, Setting(policy("mixed"), LIMITS))
    assert time.monotonic() - began < 30
    assert not any(thread.name == "pagedserve-sender" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("dtype", "bfloat16", "float32"),
        ("kv_cache_dtype", "fp8", "auto"),
        ("tensor_parallel_size", 2, 1),
        ("has_graphs", True, False),
    ],
)
def test_a_profile_of_something_else_is_refused(name: str, there: object, here: object):
    with idle_engine() as engine:
        check_profile(tiny_profile(), engine)
        other = {**tiny_profile().provenance, name: there}
        with pytest.raises(ValueError, match=f"{name} {there} in the profile, {here} here"):
            check_profile(Profile(other, tiny_profile().steps, tiny_profile().host), engine)
