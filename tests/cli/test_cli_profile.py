"""``pagedserve profile``: a file to predict with, a short table, and what was left out or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_models import save_tiny_model
from cli_run import Run, assert_refused

from pagedserve.cli import profile as command
from pagedserve.cli.engine_options import EngineOptions
from pagedserve.metrics.profile import Profile, StepPoint
from pagedserve.policy import StepShape

QUICK = ("--grid", "small", "--repeats", "1", "--dtype", "float32", "--max-num-seqs", "40")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1280)


def test_a_profile_is_written_shown_and_named_by_its_hash(run: Run, model: Path, tmp_path: Path) -> None:
    from pagedserve.engine.profile_grid import GRIDS

    path = tmp_path / "p.json"
    ran = run("profile", "--model", model, "--out", path, *QUICK, "--repeats", 3)
    assert (ran.code, ran.err) == (0, f"loading {model}\n")
    found = Profile.load(path)
    grid = GRIDS["small"]
    assert len(found.steps) == 10 + 5 + 1 + 14 + 4
    assert {point.num_repeats for point in found.steps} == {3}
    assert [point.num_rows for point in found.host] == [1, 8]
    assert found.provenance["model"] == str(model)
    assert found.provenance["grid"]["chunk_tokens"] == list(grid.chunk_tokens)
    assert found.provenance["limits"]["max_num_seqs"] == 40
    lines = ran.out.splitlines()
    assert "float32: as requested" in lines
    assert (
        "measuring 34 steps, the host's time (1 row, 8 rows) and copies to host memory, 3 times each after a warm-up"
        in lines
    )
    assert lines[-1] == f"saved in {path} (sha256 {found.sha256()})"
    assert any(line.startswith(f"{model} in float32 on ") for line in lines)
    assert any("torch " in line and found.provenance["date"] in line for line in lines)
    titles = [line for line in lines if "\\" in line]
    assert [title.split() for title in titles] == [
        ["chunk", "of", "tokens", "\\", "context", "0", "512"],
        ["decode", "batch", "\\", "context", "16", "512"],
        ["decode", "batch", "(context", "512)", "\\", "with", "a", "chunk", "of", "64"],
    ]
    rows = [line.split() for line in lines if re.fullmatch(r"\s+\d+( +[\d.,]+)+", line)]
    batches = ["1", "4", "16", "32"]
    assert [row[0] for row in rows] == ["1", "16", "64", "256", "512", *batches, *batches]
    chunk = next(p for p in found.steps if p.shape.chunks == ((16, 512),))
    assert rows[1][2] == f"{chunk.p50_ns / 1e6:,.2f}"
    even = next(p for p in found.steps if p.kind == "decode" and p.shape.decode_context_sumsq == 16 * 512**2)
    assert rows[7][2] == f"{even.p50_ns / 1e6:,.2f}"
    mixed = next(p for p in found.steps if p.kind == "mixed" and p.shape.num_decodes == 4)
    assert rows[10][1] == f"{mixed.p50_ns / 1e6:,.2f}"


def test_what_the_limits_leave_out_is_said_and_not_shown(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    ran = run("profile", "--model", model, "--out", path, *QUICK, "--max-model-len", 200, "--max-num-seqs", 4)
    found = Profile.load(path)
    assert "measuring 10 steps (24 of the grid's 34 do not fit the limits and are left out)" in ran.out
    assert "the host's time (1 row)" in ran.out
    assert len(found.steps) == 10
    assert {(point.kind, point.shape.decode_context_sum) for point in found.steps} == {
        ("chunk", 0),
        ("unsampled", 0),
        ("split", 0),
        ("decode", 16),
        ("decode", 64),
    }
    assert "512" not in ran.out.partition("chunk of tokens")[2].partition("microseconds")[0]
    assert "with a chunk of" not in ran.out


def test_mistakes_are_told_before_a_model_is_loaded(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineOptions, "start", lambda *_, **__: pytest.fail("a model was loaded"))
    path = tmp_path / "p.json"
    path.write_text("mine")
    args = ("profile", "--model", model)
    assert_refused(run(*args), "--out")
    assert_refused(run("profile", "--out", path), "--model")
    assert_refused(run(*args, "--out", path), path, "exists already", "--overwrite")
    assert_refused(run(*args, "--out", tmp_path / "no" / "p.json"), "does not exist")
    new = ("--out", tmp_path / "new.json")
    assert_refused(run(*args, *new, "--grid", "big"), "'big'", "standard, small")
    assert_refused(run(*args, *new, "--repeats", "0"), "--repeats", "at least 1")
    assert_refused(run(*args, *new, "--max-num-seqs", "600"), "600", "512")
    assert_refused(run(*args, *new, "--policy", "mixed"), "--policy")
    assert_refused(run(*args, *new, "-tp", "2"), "--tensor-parallel-size is 2", "one rank")
    assert path.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_limits_without_room_and_models_that_do_not_load(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for args, words in (
        (("--model", model, "--max-model-len", "20"), ("--max-model-len 20", "raise the limits")),
        (("--model", tmp_path), ("no config.json",)),
    ):
        ran = run("profile", *args, "--out", path, *QUICK)
        assert (ran.code, ran.out) == (2, "")
        last = ran.err.splitlines()[-1]
        assert last.startswith("Error: ")
        assert all(word in last for word in words)
    assert not path.exists()


def test_an_old_profile_is_replaced_when_asked(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{}")
    few = ("--max-model-len", "40", "--max-num-seqs", "1", "--num-blocks", "8")
    ran = run("profile", "--model", model, "--out", path, *QUICK, *few, "--overwrite")
    assert ran.code == 0
    assert json.loads(path.read_text())["format_version"] == 1


def test_an_interrupt_leaves_no_file(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedserve.engine import profiler

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler.StepBench, "measure", interrupted)
    ran = run("profile", "--model", model, "--out", tmp_path / "p.json", *QUICK)
    assert ran.code == 130
    assert "interrupted" in ran.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("spread", "is_noisy"), [(2, False), (30, True)])
def test_a_busy_machine_is_named(spread: int, is_noisy: bool) -> None:
    shape = StepShape(((1, 0),), num_samples=1)
    quiet, worst = (
        StepPoint("chunk", shape, 100, 100, 100 + spread, 5),
        StepPoint("chunk", shape, 50, 100, 100, 5),
    )
    said = command._spread(Profile({}, (quiet, quiet, worst), ()))
    assert f"{spread}% at the median step, 50% at the worst" in said
    assert ("measure again" in said) is is_noisy


def test_the_grids_named_are_those_there_are() -> None:
    from pagedserve.engine.profile_grid import GRIDS

    assert set(command.GRID_NAMES) == set(GRIDS)
