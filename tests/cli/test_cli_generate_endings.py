"""How ``pagedserve generate`` ends when an output fails or somebody presses Ctrl-C, and how it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_generating import GREEDY, SMALL, greedy_text
from cli_models import save_tiny_model
from cli_run import Run

from pagedserve.cli.completions import PrinterState
from pagedserve.cli.engine_options import EnginePolicyOptions
from pagedserve.policy import Policy, Step
from pagedserve.policy.batching import Mixed

ROOT = Path(__file__).resolve().parents[2]


def test_the_printer_keeps_the_order_of_completions(capsys: pytest.CaptureFixture[str]) -> None:
    printer = PrinterState(["one", "two", "three"])
    printer.begin()
    printer.add(2, "C", False)
    printer.add(1, "B", False)
    assert capsys.readouterr().out == "one\n"
    printer.add(0, "A", False)
    printer.add(1, "b", True)
    assert capsys.readouterr().out == "A"
    printer.add(0, "a", True)
    assert capsys.readouterr().out == "a\ntwo\nBb\nthree\nC"
    printer.break_off()
    assert capsys.readouterr().out == "\n"
    printer.add(2, "", True)
    assert capsys.readouterr().out == "\n"
    printer.break_off()
    assert capsys.readouterr().out == ""


def test_an_output_that_fails_is_told_and_the_exit_code_says_so(run: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = save_tiny_model(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    ran = run("generate", "--model", broken, *SMALL, "x")
    assert (ran.code, ran.out) == (1, "\n")
    assert "(1 error)" in ran.err
    assert ran.err.splitlines()[-1].startswith("Error: request 0: ")


def test_an_interrupt_ends_the_line_and_the_process_with_130(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "long", max_position_embeddings=16384)
    args = ["--model", str(model), "--ignore-eos", "--max-tokens", "16000", "--max-model-len", "16384"]
    args += ["--num-blocks", "1024", "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "r.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedserve.cli.main", "generate", *args, "--overlap-depth", "1", "hello"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
    )
    stdout: Any = process.stdout
    assert 0 < len(stdout.read1(1 << 16)) < 4096, "text came in small pieces"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err.decode().splitlines()[-1] == (
        "Error: interrupted: what was being computed is lost, what was saved before is whole"
    )
    assert b"Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["long"]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_interrupt_prints_nothing_more(
    depth: int, generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three outputs the first was being shown; those behind it are not, though they had begun."""
    from pagedserve.engine.runner import ModelRunner

    texts = ("hello", "you", "there")
    whole, num_waits = greedy_text(generate, texts[0]), 0
    wait = ModelRunner.wait

    def interrupted(self: ModelRunner) -> Any:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 4:
            signal.raise_signal(signal.SIGINT)
        return wait(self)

    monkeypatch.setattr(ModelRunner, "wait", interrupted)
    ran = generate(*GREEDY, "--overlap-depth", depth, "--out", tmp_path / "runs", *texts)
    assert ran.code == 130
    label, shown, *others = ran.out.split("\n", 2)
    assert label == "--- 1 of 3: hello"
    assert whole.startswith(shown.removesuffix("\N{REPLACEMENT CHARACTER}"))
    assert others == [""]
    assert ran.err.splitlines()[-1].startswith("Error: interrupted")
    assert not (tmp_path / "runs").exists()


class BeginsLater:
    """A rule that schedules nothing for 20 ms, and says so."""

    def __init__(self) -> None:
        self.begin_ns: int | None = None

    def compose(self, step: Step) -> None:
        """Name the time until it has come."""
        if self.begin_ns is None:
            self.begin_ns = step.now_ns + 20_000_000
        if step.now_ns < self.begin_ns:
            step.wake_at(self.begin_ns)
        else:
            Mixed().compose(step)


def test_a_policy_that_waits_is_waited_for(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sleeps until the time that it named."""
    expected = greedy_text(generate, "hello")
    patient = ("patient", Policy(batching=BeginsLater()))
    monkeypatch.setattr(EnginePolicyOptions, "chosen", lambda _: patient)
    ran = generate(*GREEDY, "hello")
    assert (ran.code, ran.out) == (0, expected + "\n")
