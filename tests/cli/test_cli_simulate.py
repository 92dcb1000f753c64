"""``pagedserve simulate`` runs what it was asked to run, says what it decided, and saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import SMALL, Run

from pagedserve.metrics.compare import POLICY_COLUMNS
from pagedserve.metrics.identity import first_difference
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import Slo, summarize
from pagedserve.policy import Limits, policy
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.devices import device, fit_num_blocks
from pagedserve.simulator.geometry import geometry
from pagedserve.simulator.roofline import RooflineCost, RooflineParameters
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.sample_files import sample
from pagedserve.traces.synthesis import SharedPrefixes, synthesize
from pagedserve.traces.trace import Trace
from pagedserve.traces.transforms import clip_lengths, first, rebase, scale_time, window, with_rate

H200 = RooflineCost(device("h200"), geometry("llama-3.1-8b"))
FIRST = ("--trace", "sample:azure_shaped_500", "--first", "12")


def _trace() -> Trace:
    return first(sample("azure_shaped_500"), 12)


def test_says_what_was_decided_and_shows_throughput_beside_latency_and_memory(run: Run) -> None:
    ran = run("simulate", *FIRST)
    assert (ran.code, ran.err) == (0, "")
    num_blocks = fit_num_blocks(device("h200"), geometry("llama-3.1-8b"))
    for said in (
        "500 rows read, 12 kept",
        "488 dropped: after the first 12",
        f"KV pool: {num_blocks:,} blocks of 16 tokens",
        "0.92 of 140.40 GiB beside 14.96 GiB of weights",
        "roofline of Llama-3.1-8B on NVIDIA H200",
        "assumed, not measured",
        "vllm_v1: batching mixed, order fcfs, victim newest, preemption_mode recompute, allocator paged",
        "the trace does not say which prompts share blocks",
        "vllm_v1: 12 requests: 12 stop",
    ):
        assert said in ran.out
    headings = [shown.heading for shown in POLICY_COLUMNS]
    assert headings[0] == "output tokens/s"
    for heading in (*headings, "preemptions", "requests/s"):
        assert f"\n{heading} " in ran.out


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "defaults": ((), {}),
    "overlap": (("--overlap-depth", "1"), {"overlap_depth": 1}),
    "declared limit": (("--max-tokens", "20"), {"max_tokens": 20}),
    "time-out": (("--client-timeout", "0.5"), {"client_timeout_s": 0.5}),
    "closed loop": (("--max-in-flight", "2"), {"max_in_flight": 2}),
    "vLLM's name for it": (("--max-concurrency", "2"), {"max_in_flight": 2}),
    "checked": (("--check",), {"check": True}),
    "plans kept": (("--keep-plans",), {"keep_plans": True}),
    "limits": (
        ("--max-num-seqs", "3", "--max-num-batched-tokens", "512", "--max-model-len", "2000"),
        {"limits": {"max_num_seqs": 3, "max_num_batched_tokens": 512, "max_model_len": 2000}},
    ),
    "blocks": (
        ("--block-size", "32"),
        {"limits": {"block_size": 32}, "cost": RooflineCost(H200.device, H200.geometry, block_size=32)},
    ),
    "blocks on the host": (
        ("--policy", "mixed,preemption_mode=swap", "--num-cpu-blocks", "50"),
        {"policy": ("mixed", {"preemption_mode": "swap"}), "limits": {"num_cpu_blocks": 50}},
    ),
    "vLLM's name for blocks": (("--num-gpu-blocks-override", "300"), {"limits": {"num_blocks": 300}}),
    "queue limit": (("--max-num-queued-reqs", "1"), {"limits": {"max_num_queued_reqs": 1}}),
    "another policy": (("--policy", "static"), {"policy": ("static", {})}),
    "a setting of all": (("--set", "watermark=0.2"), {"policy": ("vllm_v1", {"watermark": 0.2})}),
    "a setting of one": (
        ("--policy", "mixed,allocator=contiguous_limit,scheduler_reserve_full_isl=false"),
        {"policy": ("mixed", {"allocator": "contiguous_limit", "scheduler_reserve_full_isl": False})},
    ),
    "no caching": (
        ("--no-enable-prefix-caching",),
        {"policy": ("vllm_v1", {"enable_prefix_caching": False})},
    ),
    "caching": (
        ("--policy", "mixed", "--enable-prefix-caching"),
        {"policy": ("mixed", {"enable_prefix_caching": True})},
    ),
    "device and model": (
        ("--device", "L40S", "--model", "Qwen/Qwen2.5-7B-Instruct"),
        {"cost": RooflineCost(device("l40s"), geometry("qwen2.5-7b"))},
    ),
    "host gap": (
        ("--host-gap-us", "100", "--host-gap-per-seq-us", "1.5"),
        {
            "cost": RooflineCost(
                device("h200"),
                geometry("llama-3.1-8b"),
                RooflineParameters(host_step_ns=100_000, host_row_ns=1_500),
            )
        },
    ),
    "constant": (
        ("--cost", "constant", "--step-us", "1000", "--prefill-token-us", "2", "--decode-us", "0.5"),
        {"cost": ConstantCost(1_000_000, 2_000, 500)},
    ),
    "constant with a gap": (
        ("--cost", "constant", "--step-us", "900", "--host-gap-us", "100"),
        {"cost": ConstantCost(900_000, host_base_ns=100_000)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_option_reaches_the_simulation(case: str, run: Run, tmp_path: Path) -> None:
    """The record saved is the one that `simulate` makes of the same arguments, to the last plan."""
    args, changes = CASES[case]
    pool = () if "--num-gpu-blocks-override" in args else ("--num-blocks", "700")
    ran = run("simulate", *FIRST, *pool, *args, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    (folder,) = (tmp_path / "out").iterdir()
    assert f"saved in {folder}" in ran.out

    changes = dict(changes)
    name, settings = changes.pop("policy", ("vllm_v1", {}))
    limits = Limits(**{"num_blocks": 700, **changes.pop("limits", {})})
    cost = changes.pop("cost", H200)
    expected = simulate(_trace(), policy(name, **settings), cost, limits, **changes)
    assert first_difference(RunRecord.load(folder), expected) is None
    if case not in ("defaults", "checked"):  # an option that did nothing would prove nothing
        base = simulate(_trace(), policy("vllm_v1"), H200, Limits(num_blocks=700))
        assert first_difference(base, expected) is not None


def test_trace_options_are_applied_in_their_stated_order(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    args = ("--window", "10:40", "--first", "30", "--max-prompt", "900", "--max-total", "1000", "--rate", "3")
    ran = run("simulate", "--trace", "sample:azure_shaped_500", *args, "--num-blocks", 800, "--json", path)
    assert ran.code == 0, ran.err
    expected = first(rebase(window(sample("azure_shaped_500"), 10, 40)), 30)
    expected = with_rate(clip_lengths(expected, 900, 1000), 3)
    assert json.loads(path.read_text())["trace"]["sha256"] == expected.sha256()
    assert "clipped: the prompt exceeded max_prompt" in ran.out


def test_time_scale_and_over_limit(run: Run) -> None:
    ran = run(
        "simulate",
        *FIRST,
        "--time-scale",
        "0.5",
        "--max-prompt",
        "900",
        "--over-limit",
        "drop",
        "--json",
        "-",
    )
    expected = scale_time(clip_lengths(_trace(), 900, mode="drop"), 0.5)
    assert json.loads(ran.out)["trace"]["sha256"] == expected.sha256()


def test_synthetic_traces(run: Run) -> None:
    ran = run(
        *("simulate", "--trace", "synthetic", "--num-prompts", 20, "--rate", 50, "--burstiness", 0.5),
        *("--input-len", "lognormal:median=100,sigma=0.5,max=400", "--output-len", "uniform:2:9"),
        *("--seed", 3, "--shared-prefix", "2:64", "--rescale-arrivals", "--json", "-"),
    )
    from pagedserve.traces.lengths import LogNormal, Uniform

    expected = synthesize(
        20,
        50,
        burstiness=0.5,
        prompt=LogNormal(median=100, sigma=0.5, maximum=400),
        output=Uniform(2, 9),
        seed=3,
        rescale=True,
        prefixes=SharedPrefixes(2, 64),
    )
    results = json.loads(ran.out)
    assert results["trace"]["sha256"] == expected.sha256()
    assert results["runs"]["vllm_v1"]["metrics"]["prefix_hit_rate"] > 0


def test_lengths_from_another_trace(run: Run) -> None:
    args = ("--num-prompts", 5, "--rate", "inf", "--lengths-from", "sample:shared_prefix_200", "--json", "-")
    from pagedserve.traces.lengths import TraceLengths

    results = json.loads(run("simulate", "--trace", "synthetic", *args).out)
    expected = synthesize(5, float("inf"), lengths=TraceLengths(sample("shared_prefix_200")))
    assert results["trace"]["sha256"] == expected.sha256()
    assert results["trace"]["summary"]["rate_per_s"] is None


def test_policies_are_compared_in_one_table_saved_and_drawn(run: Run, tmp_path: Path) -> None:
    out, results = tmp_path / "new" / "runs", tmp_path / "r.json"
    labels = ["mixed", "mixed,allocator=contiguous_max", "static"]
    policies = [arg for label in labels for arg in ("--policy", label)]
    ran = run("simulate", *SMALL, *policies, "--out", out, "--plots", "--json", results, "--slo-ttft", 1)
    assert (ran.code, ran.err) == (0, "")
    heading = next(line for line in ran.out.splitlines() if line.strip().startswith("mixed  "))
    assert heading.split() == labels
    for name in ("latency.png", "memory.png", "load.png", "policies.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"drawn: {out / name}" in ran.out
    assert len(list(out.iterdir())) == 4 + len(labels)
    runs = json.loads(results.read_text())["runs"]
    assert list(runs) == labels
    for label in labels:
        record = RunRecord.load(out / label)
        assert runs[label]["metrics"] == summarize(record, Slo(ttft_s=1)).as_dict()
        assert runs[label]["header"] == record.header
        assert runs[label]["record"] == str(out / label)
    assert "\nSLO kept (% of requests) " in ran.out
    assert "\ngoodput (requests/s) " in ran.out


def test_refusals_and_time_outs_are_counted_with_their_reason(run: Run) -> None:
    ran = run(
        *("simulate", *FIRST, "--max-model-len", 1000, "--client-timeout", 0.3, "--policy", "serial"),
        *("--max-num-queued-reqs", 2),
    )
    assert ran.code == 0
    trace = _trace()
    num_long = int((trace.num_prompt_tokens >= 1000).sum())
    assert num_long > 1
    assert f"\n  {num_long} refused, such as: request " in ran.out
    assert "max_model_len is 1000" in ran.out
    assert "requests wait and max_num_queued_reqs is 2" in ran.out
    assert " timeout" in ran.out


def test_equal_arguments_give_equal_json(run: Run) -> None:
    first_time, again = (run("simulate", *SMALL, "--json", "-") for _ in range(2))
    assert first_time.out == again.out
    assert first_time.err == again.err == ""
    json.loads(first_time.out)  # nothing but JSON


def test_results_are_replaced_only_when_asked(run: Run, tmp_path: Path) -> None:
    args = ("simulate", *SMALL, "--out", tmp_path, "--json", tmp_path / "r.json", "--plots")
    assert run(*args).code == 0
    before = (tmp_path / "r.json").read_text()
    assert run(*args).code == 2
    assert (tmp_path / "r.json").read_text() == before
    assert run(*args, "--overlap-depth", 1, "--overwrite").code == 0
    assert (tmp_path / "r.json").read_text() != before
    assert RunRecord.load(tmp_path / "vllm_v1").header["overlap_depth"] == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_watched_run_has_a_progress_bar_on_stderr(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    ran = run("simulate", *SMALL, "--json", "-")
    assert "vllm_v1" in ran.err
    json.loads(ran.out)
