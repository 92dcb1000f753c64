"""Messages name options as they are typed, whatever the rest of the code calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
from cli_run import Run, assert_refused, bare_fields, commands
from typer import Option

from pagedserve.cli.engine_options import EngineOptions
from pagedserve.cli.errors import BadField, BadInput, as_bad_input
from pagedserve.cli.flags import flags_of, given, with_flags
from pagedserve.cli.option_groups import grouped
from pagedserve.cli.simulated_options import SimulatedOptions

FLAGS = {"max_model_len": "--max-model-len", "num_blocks": "--num-blocks", "seed": "--seed", "n": "--n"}
FLAGS |= {"guided_json": "--guided-json", "guided_choice": "--guided-choice"}
MODEL = ("--model", "nowhere")
TRACE = ("--trace", "sample:azure_shaped_500")
LIMITS = ("--max-num-seqs", "9000")
# What each command leaves to the policy or the traces to refuse, and the flag in the refusal.
REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "generate": ((*MODEL, *LIMITS, "x"), "--max-num-seqs"),
    "profile": ((*MODEL, *LIMITS, "--out", "p.json"), "--max-num-seqs"),
    "serve": ((*MODEL, *LIMITS), "--max-num-seqs"),
    "simulate": ((*TRACE, *LIMITS), "--max-num-seqs"),
    "replay": ((*MODEL, *TRACE, *LIMITS), "--max-num-seqs"),
    "validate": ((*MODEL, *TRACE, *LIMITS), "--max-num-seqs"),
}
LEFT_OUT = {"demo", "report", "info", "convert", "list"}
"""Commands whose options are all checked where they are declared."""


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "max_model_len is 8: lower it or raise num_blocks",
            "--max-model-len is 8: lower it or raise --num-blocks",
        ),
        ("num_blocks, which says", "--num-blocks, which says"),
        ("num_blocks[3] is 9", "--num-blocks[3] is 9"),
        ("seed is 2", "--seed is 2"),
        ("n has no value", "--n has no value"),
        ("the seed is 2, and n of them", "the seed is 2, and n of them"),
        ("limits.num_blocks: expected 1", "limits.num_blocks: expected 1"),
        ("p.json: the key 'num_blocks' is missing", "p.json: the key 'num_blocks' is missing"),
        ("runs/num_blocks/x and num_blocks.csv", "runs/num_blocks/x and num_blocks.csv"),
        ("my_num_blocks and num_blocks_2", "my_num_blocks and num_blocks_2"),
        ("--num-blocks is 3", "--num-blocks is 3"),
        ("structured_outputs.choice[1] is ''", "--guided-choice[1] is ''"),
        ("top_k is 3", "top_k is 3"),
    ],
)
def test_fields_become_flags_where_they_stand_alone(message: str, told: str) -> None:
    assert with_flags(message, FLAGS) == told


def test_every_option_of_every_command_has_its_flag() -> None:
    found = commands()
    assert set(found) == {*REFUSALS, *LEFT_OUT}
    for command, flags in found.items():
        for field, flag in flags.items():
            assert flag.startswith("--")
            assert "_" not in flag
            told = with_flags(f"{field} is 3; it must be 4", flags)
            assert told == f"{flag} is 3; it must be 4", command
    assert found["simulate"]["num_blocks"] == "--num-blocks"
    assert found["simulate"]["source"] == "--trace"
    assert found["generate"]["settings"] == "--set"
    assert found["generate"]["enable_prefix_caching"] == "--enable-prefix-caching"
    assert found["generate"]["quiet"] == "--quiet"
    assert "positional" not in found["serve"]


@pytest.mark.parametrize("command", REFUSALS)
def test_what_others_refuse_is_told_with_flags(command: str, run: Run) -> None:
    args, flag = REFUSALS[command]
    assert_refused(run(command, *args), flag)


def test_a_flag_of_several_names_is_the_first_long_one() -> None:
    annotations = {
        "size": Annotated[int, Option("-s", "--size", "--length")],
        "loud": Annotated[bool, Option("--loud/--quiet")],
        "own_name": Annotated[int, Option(help="--not-this")],
        "plain": int,
    }
    assert flags_of(annotations) == {"size": "--size", "loud": "--loud", "own_name": "--own-name"}


def test_given_options_are_those_that_differ_from_their_defaults() -> None:
    assert given(EngineOptions("m")) == []
    changed = EngineOptions("m", dtype="float32", enforce_eager=True, num_blocks=3)
    assert given(changed) == ["--dtype", "--enforce-eager", "--num-blocks"]
    assert given(changed, ("num_blocks", "device")) == ["--num-blocks"]
    assert given(SimulatedOptions(profile=Path("p"), step_us=0.0)) == ["--profile", "--step-us"]


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError, "--max-num-seqs is 3"), (BadInput, "max_num_seqs is 3")],
    ids=["of others", "of the command itself"],
)
def test_only_what_others_say_is_translated(error: Callable[[str], Exception], told: str) -> None:
    def command(max_num_seqs: Annotated[int, Option()]) -> None:
        with as_bad_input():
            raise error(f"max_num_seqs is {max_num_seqs}")

    with pytest.raises(BadInput) as refused:
        grouped(command)(max_num_seqs=3)
    assert str(refused.value) == told
    assert not isinstance(refused.value, BadField)


def test_the_guard_of_these_tests_sees_a_bare_field() -> None:
    assert bare_fields("max_num_seqs 9 exceeds max_num_batched_tokens 3") == [
        "max_num_seqs",
        "max_num_batched_tokens",
    ]
    assert bare_fields("--max-num-seqs, 'max_num_seqs', a/max_num_seqs, --set enable_prefix_caching=1") == []
