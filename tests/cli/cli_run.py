"""Running the command line in this process, as its users do: by its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pagedserve.cli.flags import flags_of
from pagedserve.cli.main import app
from pagedserve.cli.policy_options import SETTINGS
from pagedserve.cli.traces import traces

SMALL = (
    "--trace",
    "sample:azure_shaped_500",
    "--first",
    "12",
    "--num-blocks",
    "400",
    "--max-model-len",
    "6400",
)
"""A run that takes a few hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs the command line with these arguments."""

    def run(*args: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(arg) for arg in args], prog_name="pagedserve")
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, captured.out, captured.err)

    return run


def commands() -> dict[str, dict[str, str]]:
    """Every command, and the flags of its options by their fields' names."""
    found = {
        str(each.name): each.callback for each in (*app.registered_commands, *traces.registered_commands)
    }
    return {
        name: flags_of(callback.__annotations__) for name, callback in found.items() if callback is not None
    }


def bare_fields(text: str) -> list[str]:
    """Names of options as Python writes them, but those that are also written so elsewhere.

    A policy's settings are, after --set, and what a model's config says.
    """
    fields = {field for flags in commands().values() for field in flags if "_" in field}
    fields -= {*SETTINGS, "vocab_size"}
    return [
        word for word in re.findall(r"(?<![\w./'\"-])[a-z]+(?:_[a-z]+)+(?![\w/'\"-])", text) if word in fields
    ]


def assert_refused(ran: Ran, *words: object) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that holds the words."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert ran.err.endswith("\n")
    assert not bare_fields(ran.err)
    for word in words:
        assert str(word) in ran.err, ran.err
