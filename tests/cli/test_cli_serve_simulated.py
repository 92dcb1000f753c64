"""``serve``: what has a meaning with a live engine or a simulated one only is refused with the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import Run, assert_refused

SIMULATED = ("--engine", "simulated")
CONSTANT = (*SIMULATED, "--cost", "constant", "--step-us", "100", "--num-blocks", "9")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--profile", "p.json"), ("--profile: only a simulated engine has this", "--engine simulated")),
        (("--cost", "roofline", "--step-us", "5"), ("--cost, --step-us: only a simulated engine has this",)),
        (("--output-len", "5"), ("--output-len: only a simulated engine",)),
        (SIMULATED, ("--engine simulated needs step times: --profile FILE", "--cost roofline")),
        ((*SIMULATED, "--cost", "measured"), ("needs step times: --profile FILE",)),
        ((*CONSTANT, "--profile", "p.json"), ("--cost constant and --profile both give step times",)),
        ((*CONSTANT, "--dtype", "bfloat16"), ("--dtype: a simulated engine computes nothing",)),
        (
            (*CONSTANT, "--attention", "reference", "--device", "cuda"),
            ("--device, --attention: a simulated engine",),
        ),
        ((*CONSTANT, "--simulated-device", "h100"), ("--simulated-device h100: only --cost roofline",)),
        ((*CONSTANT, "--output-len", "normal:3"), ("--output-len is 'normal:3'; write N, uniform:",)),
        ((*CONSTANT, "--engine", "real"), ("'real' is not one of live, simulated",)),
    ],
)
def test_one_line_before_a_model_is_looked_for(
    run: Run, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(run("serve", "--model", "nowhere", *args), *words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--profile", "nowhere.json"), "nowhere.json: cannot be read as a profile"),
        (("--cost", "constant", "--step-us", "9"), "--cost constant needs --step-us"),
        (("--cost", "roofline", "--simulated-device", "abacus"), "unknown device 'abacus'; known: "),
        (("--cost", "roofline", "--step-us", "9"), "--step-us: these are the times of --cost constant"),
        (("--profile", "nowhere.json", "--host-gap-us", "9"), "a profile brings its own device"),
    ],
)
def test_wrong_times_are_refused_when_the_model_is_known(
    run: Run, model: Path, args: tuple[str, ...], words: str
) -> None:
    ran = run("serve", "--model", model, "--port", "0", *SIMULATED, *args)
    assert ran.code == 2
    loading, error = ran.err.splitlines()
    assert loading == f"loading {model}"
    assert error.startswith("Error: ")
    assert words in error
