"""What the tests of ``pagedserve generate`` share."""

from __future__ import annotations

import json
from typing import Any

from cli_run import Ran, Run, bare_fields

SMALL = ("--num-blocks", "64", "--dtype", "float32")
GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "8", *SMALL)


def outputs(ran: Ran) -> list[list[dict[str, Any]]]:
    """The completions in a command's JSON, prompt by prompt."""
    assert ran.code == 0, ran
    return [prompt["completions"] for prompt in json.loads(ran.out)["prompts"]]


def greedy_text(generate: Run, prompt: str) -> str:
    """The text that the tiny model gives by itself."""
    return outputs(generate(*GREEDY, "--json", "-", prompt))[0][0]["text"]


def assert_one_line(ran: Ran, *words: str) -> None:
    """Exit code 2, no output, and behind what was decided one line that holds the words."""
    assert (ran.code, ran.out) == (2, ""), ran
    *before, last = ran.err.splitlines()
    assert last.startswith("Error: ")
    assert not any(line.startswith(("Error", "Traceback")) for line in before)
    assert not bare_fields(last)
    for word in words:
        assert word in last
