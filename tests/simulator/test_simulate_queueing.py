"""Exact queueing: one server, known service times, waits by Lindley's recursion."""

import numpy as np
import pytest

from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Limits, policy
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.lengths import Fixed, Uniform
from pagedserve.traces.synthesis import synthesize
from pagedserve.traces.trace import Trace

LIMITS = Limits(max_num_batched_tokens=4096, max_num_seqs=8, max_model_len=4096, num_blocks=4096)
VERBS = ("schedule", "launch", "commit")
STEP_NS, TOKEN_NS, HOST_NS = 5_000_000, 1_000, 700_000


def lindley_starts(arrivals: list[int], services: list[int]) -> list[int]:
    """Start of service of each customer: W[n+1] = max(0, W[n] + S[n] - A[n])."""
    starts, wait = [], 0
    for i, arrival in enumerate(arrivals):
        if i:
            wait = max(0, wait + services[i - 1] - (arrival - arrivals[i - 1]))
        starts.append(arrival + wait)
    return starts


def columns(record: RunRecord, *names: str) -> list[list[int]]:
    return [record.requests.column(name).to_pylist() for name in names]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, float("inf")])
@pytest.mark.parametrize("rate", [2.0, 9.0, 14.0])
def test_waits_of_one_server_equal_the_lindley_recursion(rate: float, burstiness: float) -> None:
    trace = synthesize(
        300, rate, burstiness=burstiness, prompt=Uniform(1, 900), output=Uniform(1, 30), seed=7
    )
    cost = ConstantCost(STEP_NS, per_prefill_token_ns=TOKEN_NS, host_base_ns=HOST_NS)
    record = simulate(trace, "serial", cost, LIMITS)
    arrivals, prompts = trace.arrival_ns.tolist(), trace.num_prompt_tokens.tolist()
    outputs = trace.num_output_tokens.tolist()
    # The prompt's step brings the first token, every further token its own step.
    services = [n * (STEP_NS + HOST_NS) + p * TOKEN_NS for n, p in zip(outputs, prompts, strict=True)]
    starts = lindley_starts(arrivals, services)
    first, finish = columns(record, "first_schedule_ns", "finish_ns")
    assert first == starts
    assert finish == [start + service for start, service in zip(starts, services, strict=True)]
    assert max(start - arrival for start, arrival in zip(starts, arrivals, strict=True)) > 0 or rate < 5


def deterministic_trace(arrivals_ns: list[int], output: int = 3) -> Trace:
    n = len(arrivals_ns)
    return Trace.of("hand", np.array(arrivals_ns), np.full(n, 10), np.full(n, output))


def test_overlap_hides_the_host_time_of_a_busy_replica() -> None:
    """Depth 0 pays host and step in turn; depth 1 pays the longer of the two, once a step is running."""
    cost = ConstantCost(100, host_base_ns=30)
    trace = deterministic_trace([0], output=5)
    serial = simulate(trace, "mixed", cost, LIMITS)
    overlapped = simulate(trace, "mixed", cost, LIMITS, overlap_depth=1)
    assert serial.array("steps", "commit_ns").tolist() == [130, 260, 390, 520, 650]
    assert overlapped.array("steps", "commit_ns").tolist()[:5] == [130, 230, 330, 430, 530]


def test_at_depth_1_tokens_wait_for_a_host_that_takes_longer_than_the_device() -> None:
    """It hands a step over, 150 ns after it began to plan it, and then comes for the tokens of the one before."""
    cost = ConstantCost(100, host_base_ns=150)
    record = simulate(deterministic_trace([0], output=4), "mixed", cost, LIMITS, overlap_depth=1)
    schedule, launch, commit = (record.array("steps", f"{name}_ns").tolist() for name in VERBS)
    assert schedule == [0, 150, 300, 450]
    assert launch == [150, 300, 450, 600]
    assert commit == [300, 450, 600, 700]


def test_an_arrival_during_a_step_joins_the_next_or_at_depth_1_the_one_after() -> None:
    cost = ConstantCost(100)
    trace = deterministic_trace([0, 150], output=6)
    for depth, first_step in ((0, 2), (1, 3)):
        record = simulate(trace, "mixed", cost, LIMITS, overlap_depth=depth, keep_plans=True)
        assert record.plans is not None
        new = record.plans.column("new_requests").to_pylist()
        assert [step for step, requests in enumerate(new) if 1 in requests] == [first_step]


def test_order_at_one_instant_is_commit_abort_add_schedule() -> None:
    """M2: an arrival and a time-out at the instant of a commit come after it and before the next schedule."""
    cost = ConstantCost(100)
    trace = deterministic_trace([0, 0, 100, 200], output=4)
    record = simulate(trace, "mixed", cost, LIMITS, client_timeout_s=200e-9)
    calls = [(call["now_ns"], call["kind"], call["subject"]) for call in record.calls.to_pylist()]
    assert calls[:3] == [(0, "add", 0), (0, "add", 1), (0, "schedule", 0)]
    at_100 = [call[1:] for call in calls if call[0] == 100]
    assert at_100 == [("commit", 0), ("add", 2), ("schedule", 1)]
    at_200 = [call[1:] for call in calls if call[0] == 200]
    assert at_200 == [("commit", 1), ("abort", 0), ("abort", 1), ("add", 3), ("schedule", 2)]


def test_a_client_time_out_ends_the_request_and_frees_its_blocks() -> None:
    cost = ConstantCost(1_000_000)
    trace = deterministic_trace([0, 0, 0], output=50)
    record = simulate(trace, "serial", cost, LIMITS, client_timeout_s=0.06, check=True)
    assert record.requests.column("finish_reason").to_pylist() == ["stop", "timeout", "timeout"]
    finish, outputs = columns(record, "finish_ns", "num_output_tokens")
    assert finish == [50_000_000, 60_000_000, 60_000_000]
    assert outputs == [50, 10, 0]


def test_a_closed_loop_never_exceeds_its_cap_and_counts_latency_from_the_send() -> None:
    trace = synthesize(60, 1e6, prompt=Fixed(20), output=Uniform(2, 20), seed=3)
    record = simulate(trace, "mixed", ConstantCost(1_000_000), LIMITS, max_in_flight=4)
    due, sent, ended = columns(record, "due_ns", "arrival_ns", "finish_ns")
    assert due == trace.arrival_ns.tolist()
    assert all(s >= d for s, d in zip(sent, due, strict=True))
    for at in sent:
        assert sum(s <= at < e for s, e in zip(sent, ended, strict=True)) <= 4
    # Saturated: every send after the first four happens at the instant at which another ends.
    assert set(sent[4:]) <= set(ended)


def test_requests_that_can_never_run_are_refused_and_the_rest_is_served() -> None:
    """M5: an error at admission that names the numbers, once, instead of an endless wait."""
    trace = Trace.of("hand", np.array([0, 1, 2]), np.array([10, 700, 10]), np.array([2, 2, 2]))
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=5000, num_blocks=40)
    record = simulate(trace, "mixed", ConstantCost(100), limits, check=True)
    reasons, errors = columns(record, "finish_reason", "error")
    assert reasons == ["stop", "refused", "stop"]
    assert errors[1] == (
        "request 1 has 700 prompt tokens and needs 44 KV blocks; the pool has 40 of 16 tokens: "
        "shorten it or raise num_blocks"
    )


def test_facts_survive_preemption() -> None:
    """M3: lengths and arrivals in the record are the trace's, however often a request was preempted."""
    trace = synthesize(60, 1e6, prompt=Uniform(5, 60), output=Uniform(20, 80), seed=5)
    limits = Limits(max_num_batched_tokens=256, max_num_seqs=32, max_model_len=256, num_blocks=40)
    record = simulate(trace, policy("mixed", watermark=0.0), ConstantCost(1000), limits, check=True)
    prompts, outputs, arrivals, preemptions = columns(
        record, "num_prompt_tokens", "num_output_tokens", "arrival_ns", "num_preemptions"
    )
    assert sum(preemptions) > 20
    assert prompts == trace.num_prompt_tokens.tolist()
    assert outputs == trace.num_output_tokens.tolist()
    assert arrivals == trace.arrival_ns.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_timeout_s": 0}, "client_timeout_s is 0; it must be above 0, or None for no limit"),
        ({"max_in_flight": -1}, "max_in_flight is -1; it must be above 0, or None for no limit"),
        ({"cost": None}, "a trace has no step times; pass a cost model"),
        (
            {"policy": "fifo"},
            "unknown policy 'fifo'; choose from serial, static, prefill_first, mixed, vllm_v1",
        ),
    ],
)
def test_bad_arguments_are_refused_with_the_value(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"policy": "mixed", "cost": ConstantCost(100), "limits": LIMITS, **arguments}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        simulate(deterministic_trace([0]), **given)  # pyright: ignore
