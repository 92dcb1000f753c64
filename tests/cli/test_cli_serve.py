"""``serve``: the model by its place or by its option, and what the server is then started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_run import Run, assert_refused

from pagedserve.cli.engine_options import EngineOptions
from pagedserve.cli.errors import BadInput

STARTED = "started"
Started = list[tuple[EngineOptions, dict[str, Any]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What engines were to be started with; none is."""
    seen: Started = []

    def start(self: EngineOptions, *_: Any, **options: Any) -> None:
        seen.append((self, options))
        raise BadInput(STARTED)

    monkeypatch.setattr(EngineOptions, "start", start)
    return seen


@pytest.mark.parametrize(
    "args",
    [
        ("--model", "m"),
        ("m",),
        ("m", "--model", "m"),
        ("--model", "m", "m"),
        ("--max-num-seqs", "3", "m"),
        ("m", "--max-num-seqs", "3"),
        ("--max-num-seqs", "3", "--", "m"),
    ],
    ids=" ".join,
)
def test_the_model_may_stand_by_itself(args: tuple[str, ...], run: Run, started: Started) -> None:
    """As in ``vllm serve MODEL``."""
    ran = run("serve", "--port", "0", *args)
    assert (ran.code, ran.err) == (2, f"loading m\nError: {STARTED}\n")
    ((engine, options),) = started
    assert engine.model == "m"
    assert engine.max_num_seqs == (3 if "3" in args else 64)
    assert options["record"] is False


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("a", "--model", "b"), ("MODEL is a and --model is b", "give one")),
        (("--model", "b", "a"), ("MODEL is a and --model is b", "give one")),
        (("a", "b"), ("unexpected extra argument", "b")),
        ((), ("--model", "pagedserve serve --help")),
    ],
    ids=["a beside b", "b beside a", "two", "none"],
)
def test_two_models_or_none_are_refused(
    args: tuple[str, ...], words: tuple[str, ...], run: Run, started: Started
) -> None:
    assert_refused(run("serve", *args), *words)
    assert not started


def test_the_model_of_one_run_is_not_that_of_the_next(run: Run, started: Started) -> None:
    run("serve", "--port", "0", "m")
    assert_refused(run("serve", "--port", "0"), "--model")
    assert len(started) == 1


def test_a_record_is_kept_where_one_is_wanted(run: Run, started: Started, tmp_path: Path) -> None:
    run("serve", "--port", "0", "m", "--record", tmp_path)
    assert [options["record"] for _, options in started] == [True]
