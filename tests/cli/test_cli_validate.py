"""``validate``, ``replay`` and ``demo`` from end to end on tiny models, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import Ran, Run, assert_refused, bare_fields

from pagedserve.metrics.profile import Profile
from pagedserve.metrics.record import RunRecord
from pagedserve.validation.decisions import check_decisions

ENGINE = (
    "--max-model-len",
    "96",
    "--num-blocks",
    "200",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "32",
)
TRAFFIC = ("--requests", "10", "--length-scale", "0.02", "--rate", "50")
METRICS = {
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "itl_p50_s",
    "itl_p90_s",
    "e2e_p50_s",
    "kv_occupancy_mean",
    "waste_mean",
    "num_running_peak",
}


@pytest.fixture(scope="module")
def profile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the tiny model, as the command writes it."""
    from pagedserve.engine.llm import LLM
    from pagedserve.engine.profile_grid import Grid
    from pagedserve.engine.profiler import profile_engine

    llm = LLM(model, max_model_len=96, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=32)
    grid = Grid((1, 16, 30), (0, 32), (1, 4), (8, 40), (16,), (), (1, 4))
    path = tmp_path_factory.mktemp("profiles") / "tiny.json"
    profile_engine(llm.engine, "tiny", grid, num_repeats=1).save(path)
    llm.close()
    return path


def assert_refused_late(ran: Ran, *words: object) -> None:
    """Exit code 2 and one line about it, after what was decided until then."""
    assert ran.code == 2, ran
    (line,) = (line for line in ran.err.splitlines() if not line.startswith("loading "))
    assert line.startswith("Error: ")
    assert not bare_fields(line)
    for word in words:
        assert str(word) in line, line


def test_validate_writes_what_it_found(run: Run, model: Path, profile: Path, tmp_path: Path) -> None:
    out, found = tmp_path / "out", tmp_path / "found.json"
    options = ("--profile", profile, "--repeats", "2", "--policy", "mixed", "--out", out, "--json", found)
    result = run("validate", "--model", model, *ENGINE, *TRAFFIC, *options)
    assert result.code == 0, result.err
    told = json.loads(found.read_text())
    assert {"settings", "metrics", "decisions"} <= set(told)
    assert set(told["metrics"]) == METRICS
    for row in told["metrics"].values():
        assert set(row) == {"live", "simulated", "error_pct", "live_repeat_spread_pct"}
    assert told["decisions"]["steps_identical"] == told["decisions"]["steps_live"] > 0
    assert told["settings"]["profile_sha256"] == Profile.load(profile).sha256()
    assert told["settings"]["length_scale"] == 0.02
    assert told["settings"]["repeats"] == 2
    lives = [RunRecord.load(out / f"live_{number}") for number in (1, 2)]
    assert all(check_decisions(record, "mixed").identical for record in lives)
    assert RunRecord.load(out / "simulated").header["cost"]["name"] == "measured"
    for name in ("predicted.png", "distributions.png", "timelines.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "live steps identical" in result.out
    assert "of the capacity found by simulation" in result.out
    # Nothing is replaced unasked.
    again = run("validate", "--model", model, *ENGINE, *TRAFFIC, "--profile", profile, "--out", out)
    assert_refused(again, str(out), "--overwrite")


def test_json_on_standard_output_is_all_there_is(run: Run, model: Path, profile: Path) -> None:
    options = (
        "--requests",
        "3",
        "--length-scale",
        "0.01",
        "--rate",
        "inf",
        "--profile",
        profile,
        "--json",
        "-",
    )
    result = run("validate", "--model", model, *ENGINE, *options)
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["settings"]["rate_requests_per_s"] is None
    assert told["metrics"]["ttft_p50_s"]["live_repeat_spread_pct"] is None


def test_without_a_profile_the_device_is_measured_first(run: Run, model: Path, tmp_path: Path) -> None:
    options = ("--grid", "small", "--requests", "3", "--length-scale", "0.01", "--load", "0.5")
    result = run("validate", "--model", model, *ENGINE, *options, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "device measured" in result.out
    saved = Profile.load(tmp_path / "out" / "profile.json")
    told = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert told["settings"]["profile_sha256"] == saved.sha256()


MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "two clocks": (("--rate", "3", "--load", "0.5"), ("--rate 3", "--load 0.5", "give one")),
    "two scales": (("--fit", "--length-scale", "0.1"), ("--fit", "--length-scale 0.1")),
    "no load": (("--load", "0"), ("--load", "above 0")),
    "no trace": (("--trace", "nowhere.csv"), ("nowhere.csv", "nothing there")),
    "synthetic": (("--trace", "synthetic"), ("traces convert",)),
    "no profile": (("--profile", "nowhere.json"), ("nowhere.json",)),
    "grid and profile": (("--profile", "x.json", "--grid", "small"), ("--grid small", "--profile")),
    "no requests": (("--requests", "0"), ("--requests", "at least 1")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_in_one_line(run: Run, model: Path, name: str) -> None:
    options, words = MISTAKES[name]
    assert_refused(run("validate", "--model", model, *options), *words)


def test_requests_that_cannot_run_are_refused_before_the_run(run: Run, model: Path, profile: Path) -> None:
    options = ("--requests", "5", "--length-scale", "1", "--rate", "1", "--profile", profile)
    result = run("validate", "--model", model, *ENGINE, *options)
    assert_refused_late(result, "--max-model-len is", "shorten the trace's lengths")


def test_a_profile_of_another_model_is_refused(run: Run, model: Path, profile: Path, tmp_path: Path) -> None:
    content = json.loads(profile.read_text())
    content["provenance"]["geometry"]["num_layers"] = 99
    (tmp_path / "other.json").write_text(json.dumps(content))
    result = run("validate", "--model", model, *ENGINE, *TRAFFIC, "--profile", tmp_path / "other.json")
    assert_refused_late(result, "num_layers 99", "pagedserve profile")


def test_replay_saves_a_record_that_can_be_retraced(run: Run, model: Path, tmp_path: Path) -> None:
    trace = ("--trace", "sample:azure_shaped_500", "--first", "6", "--length-scale", "0.01", "--rate", "40")
    options = ("--policy", "static", "--out", tmp_path / "runs", "--json", tmp_path / "found.json")
    result = run("replay", "--model", model, *ENGINE, *trace, *options)
    assert result.code == 0, result.err
    record = RunRecord.load(tmp_path / "runs" / "static")
    assert record.requests.num_rows == 6
    assert check_decisions(record, "static").identical
    assert json.loads((tmp_path / "found.json").read_text())["record"] == str(tmp_path / "runs" / "static")
    assert "ms late" in result.out


REPLAY_MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "an engine's option for a server": (
        ("--url", "http://127.0.0.1:9", "--dtype", "float32"),
        ("--dtype", "--url"),
    ),
    "a policy for a server": (("--url", "http://127.0.0.1:9", "--policy", "static"), ("--policy", "--url")),
    "a limit for a server": (("--url", "http://127.0.0.1:9", "--max-tokens", "4"), ("--max-tokens",)),
    "a server's option without one": (("--timeout", "3"), ("--timeout", "--url")),
    "nobody there": (("--url", "http://127.0.0.1:9"), ("127.0.0.1:9",)),
}


@pytest.mark.parametrize("name", REPLAY_MISTAKES)
def test_replay_tells_mistakes_in_one_line(run: Run, name: str) -> None:
    options, words = REPLAY_MISTAKES[name]
    trace = ("--trace", "sample:azure_shaped_500", "--first", "2")
    assert_refused_late(run("replay", "--model", "m", *trace, *options), *words)


def test_simulate_takes_a_profile(run: Run, profile: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    trace = ("--trace", "sample:azure_shaped_500", "--first", "20", "--length-scale", "0.02", "--rate", "100")
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--max-model-len", "96")
    result = run("simulate", *trace, *limits, "--profile", profile, "--json", found)
    assert result.code == 0, result.err
    assert "step times: measured, tiny in " in result.out
    told = json.loads(found.read_text())
    assert told["pool"] == {"from": "profile"}
    header = told["runs"]["vllm_v1"]["header"]
    assert header["limits"]["num_blocks"] == 200
    assert header["cost"]["profile_sha256"] == Profile.load(profile).sha256()
    assert_refused(run("simulate", *trace, "--cost", "measured"), "--profile")
    assert_refused(run("simulate", *trace, "--profile", profile, "--device", "h200"), "--device", "profile")


def test_the_demo_shows_three_policies_live_and_simulated(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = run("demo", "--tiny", "--out", out, "--json", tmp_path / "demo.json")
    assert result.code == 0, result.err
    for label in ("serial", "static", "mixed"):
        assert check_decisions(RunRecord.load(out / label / "live"), label).identical
        assert RunRecord.load(out / label / "simulated").header["kind"] == "simulated"
        assert label in result.out
    told = json.loads((tmp_path / "demo.json").read_text())
    assert set(told["mixed"]["metrics"]) == METRICS
    assert (out / "foretold.png").read_bytes().startswith(b"\x89PNG")
    assert_refused(run("demo", "--tiny", "--out", out), "--overwrite")
    assert_refused(run("demo", "--tiny", "--model", "x"), "--tiny", "--model x")
