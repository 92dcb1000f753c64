"""Swapping from the command line: what asks for it, what does not fit together, and what then happens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_generating import assert_one_line, outputs
from cli_run import Run, assert_refused

from pagedserve.cli.engine_options import EngineOptions
from pagedserve.metrics.profile import Profile
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import policy
from pagedserve.validation.decisions import check_decisions

PROMPTS = [f"prompt number {index} of several" for index in range(6)]
MIXED = ("--dtype", "float32", "--max-model-len", "128", "--policy", "mixed", "--set", "watermark=0")
LONG = ("--temperature", "0", "--ignore-eos", "--max-tokens", "40")
SYNTHETIC = ("--trace", "synthetic", "--num-prompts", "12", "--rate", "1000")
BURST = (*SYNTHETIC, "--input-len", "60", "--output-len", "80")
POOL = ("--num-blocks", "40", "--max-model-len", "256")
SWAP: tuple[Any, ...] = ("--preemption-mode", "swap")

MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "swap to nowhere": (SWAP, ("swap", "give --num-cpu-blocks or --swap-space")),
    "memory for nothing": (
        ("--num-cpu-blocks", "8"),
        ("--num-cpu-blocks is 8", "recompute, which uses none"),
    ),
    "GiB for nothing": (("--swap-space", "0.5"), ("--swap-space is 0.5", "recompute, which uses none")),
    "memory twice": (
        (*SWAP, "--num-cpu-blocks", "8", "--swap-space", "1"),
        ("--num-cpu-blocks is 8 and --swap-space is 1", "give one of them"),
    ),
    "a mode twice": (
        (*SWAP, "--set", "preemption_mode=swap", "--num-cpu-blocks", "8"),
        ("--set", "give one of them"),
    ),
    "unknown mode": (("--preemption-mode", "drop"), ("'drop'", "recompute, swap")),
    "no blocks": (("--num-cpu-blocks", "0"), ("--num-cpu-blocks", "at least 1")),
}


@pytest.mark.parametrize("case", MISTAKES)
@pytest.mark.parametrize("command", ["generate", "serve", "replay", "validate"])
def test_mistakes_are_told_before_a_model_is_loaded(
    case: str, command: str, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, words = MISTAKES[case]
    monkeypatch.setattr(EngineOptions, "start", lambda *_, **__: pytest.fail("a model was loaded"))
    more = {"generate": ("x",), "replay": ("--trace", "sample:azure_shaped_500", "--first", "3")}
    assert_refused(run(command, "--model", model, *args, *more.get(command, ())), *words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (SWAP, ("swap", "--num-cpu-blocks is 0")),
        (("--num-cpu-blocks", "8"), ("--num-cpu-blocks is 8 and no policy swaps", "leave it out, or swap")),
        (("--swap-block-us", "8"), ("--swap-block-us", "roofline")),
        (
            ("--cost", "constant", "--step-us", "900", "--swap-block-us", "8"),
            ("--swap-block-us", "nothing is swapped"),
        ),
    ],
)
def test_simulate_refuses_half_of_it(run: Run, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(run("simulate", *BURST, *POOL, *args), *words)


def test_what_only_the_model_shows(generate: Run) -> None:
    told = "--num-cpu-blocks 1000000000000", "GiB are left"
    assert_one_line(generate(*SWAP, "--num-cpu-blocks", 10**12, "x"), *told)
    told = "--swap-space is 1e-09 GiB", "one KV block takes"
    assert_one_line(generate(*SWAP, "--swap-space", "1e-9", "x"), *told)


@pytest.mark.parametrize("depth", ["0", "1"])
@pytest.mark.parametrize("memory", [("--num-cpu-blocks", "64"), ("--swap-space", "0.01")])
def test_generate_swaps_and_says_the_same(
    generate: Run, tmp_path: Path, memory: tuple[str, ...], depth: str
) -> None:
    def ids(ran: Any) -> list[list[int]]:
        return [completion["token_ids"] for each in outputs(ran) for completion in each]

    roomy = ids(generate(*LONG, *MIXED, "--num-blocks", "200", "--json", "-", *PROMPTS))
    saving = ("--out", tmp_path / "runs", "--json", "-")
    tight = (*MIXED, "--num-blocks", "12", *SWAP, *memory, "--overlap-depth", depth)
    ran = generate(*LONG, *tight, *saving, *PROMPTS)
    assert ids(ran) == roomy
    assert "KV blocks in host memory" in ran.err
    metrics = json.loads(ran.out)["metrics"]
    told = f", recomputed tokens 0, KV blocks swapped out {metrics['num_blocks_swapped_out']:.0f}\n"
    assert told in ran.err
    assert metrics["num_blocks_swapped_out"] == metrics["num_blocks_swapped_in"] > 0
    assert (metrics["num_recomputed_tokens"], metrics["num_cpu_blocks_peak"] > 0) == (0, True)
    record = RunRecord.load(tmp_path / "runs" / "mixed")
    assert record.header["limits"]["num_cpu_blocks"] > 0
    assert check_decisions(record, policy("mixed", watermark=0.0, preemption_mode="swap")).identical


def test_simulate_compares_both_modes(run: Run, tmp_path: Path) -> None:
    modes = ("--policy", "mixed", "--policy", "mixed,preemption_mode=swap", "--num-cpu-blocks", "100")
    ran = run("simulate", *BURST, *POOL, *modes, "--json", tmp_path / "s.json")
    assert (ran.code, ran.err) == (0, "")
    assert "num_cpu_blocks 100" in ran.out
    assert "\nblocks swapped out " in ran.out
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["limits"]["num_cpu_blocks"] == 100
    again, swapped = (each["metrics"] for each in found["runs"].values())
    assert again["num_recomputed_tokens"] > 0 == again["num_blocks_swapped_out"]
    assert swapped["num_recomputed_tokens"] == 0 < swapped["num_blocks_swapped_in"]
    plain = run("simulate", *BURST, *POOL, "--policy", "mixed")
    assert plain.code == 0
    assert "swapped" not in plain.out


def test_simulate_takes_a_price_of_a_block(run: Run) -> None:
    fixed = ("--cost", "constant", "--step-us", "900", *SWAP, "--num-cpu-blocks", "100")
    times = []
    for price in ("0", "5000"):
        ran = run("simulate", *BURST, *POOL, *fixed, "--swap-block-us", price, "--json", "-")
        (result,) = json.loads(ran.out)["runs"].values()
        times.append(result["metrics"]["duration_s"])
    assert times[0] < times[1]


def test_a_profile_without_swaps_is_refused_and_a_new_one_is_not(
    run: Run, model: Path, tmp_path: Path
) -> None:
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "160")
    limits = (*limits, "--num-blocks", "60")
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    ran = run("profile", "--model", model, "--out", new, "--grid", "small", "--repeats", "1", *limits)
    assert ran.code == 0
    for way in ("to", "from"):
        assert f"microseconds of copying so many KV blocks {way} host memory (p50): " in ran.out
    replace(Profile.load(new), swaps=()).save(old)
    swap = (*SWAP, "--num-cpu-blocks", "64")
    simulation = ("simulate", *BURST, *POOL, *swap)
    assert_refused(run(*simulation, "--profile", old), "no measurements of swaps", "pagedserve profile")
    assert_refused(run(*simulation, "--profile", new, "--block-size", "8"), "with --block-size 8")
    assert run(*simulation, "--profile", new).code == 0
    traffic = ("--requests", "4", "--length-scale", "0.02", "--rate", "50")
    validation = ("validate", "--model", model, *limits, *traffic, *swap)
    ran = run(*validation, "--profile", old)
    assert ran.code == 2
    assert "no measurements of swaps" in ran.err.splitlines()[-1]
    ran = run(*validation, "--profile", new, "--json", tmp_path / "v.json")
    assert ran.code == 0, ran
    assert json.loads((tmp_path / "v.json").read_text())["decisions"]["first_difference"] is None
    serving = ("serve", "--model", model, "--engine", "simulated", "--profile", old, "--port", "0", *swap)
    assert_one_line(run(*serving), "no measurements of swaps")
