"""The small parts: parsers of values, and groups of options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from typer import BadParameter, Option, Typer

from pagedserve.cli.errors import BadInput, OneLineGroup, as_bad_input
from pagedserve.cli.option_groups import grouped
from pagedserve.cli.output_options import replacing
from pagedserve.cli.values import one_of, real, whole


@dataclass(frozen=True, slots=True)
class Size:
    """Two options."""

    width: Annotated[int, Option(parser=whole(1, 9))] = 3
    tags: Annotated[list[str] | None, Option("--tag")] = None


def test_a_group_is_spread_over_the_command_line_and_comes_back_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Any] = []

    def draw(
        name: Annotated[str, Option()], size: Size, loud: Annotated[bool, Option("--loud")] = False
    ) -> None:
        seen.append((name, size, loud))

    app = Typer(cls=OneLineGroup, add_completion=False)
    app.command("draw")(grouped(draw))
    app.callback()(lambda: None)
    for args in (["--name", "a"], ["--name", "b", "--width", "9", "--tag", "x", "--tag", "y", "--loud"]):
        with pytest.raises(SystemExit) as ended:
            app(["draw", *args])
        assert ended.value.code == 0
    assert [(name, size.width, list(size.tags or []), loud) for name, size, loud in seen] == [
        ("a", 3, [], False),
        ("b", 9, ["x", "y"], True),
    ]
    with pytest.raises(SystemExit) as ended:
        app(["draw", "--name", "c", "--width", "10"])
    assert ended.value.code == 2
    assert "10 is not a whole number from 1 to 9" in capsys.readouterr().err


def test_two_groups_must_not_share_a_name() -> None:
    def draw(size: Size, width: Annotated[int, Option()] = 1) -> None: ...

    with pytest.raises(AssertionError, match="share a name"):
        grouped(draw)


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (whole(1), {"1": 1, "12": 12}, ["0", "-3", "1.5", "x", ""]),
        (whole(0, 1), {"0": 0, "1": 1}, ["2", "-1"]),
        (real(0, above=True), {"0.5": 0.5, "1e3": 1000.0}, ["0", "-1", "inf", "nan", "x"]),
        (real(0, above=True, infinite=True), {"inf": float("inf"), "2": 2.0}, ["0", "nan", "-inf"]),
        (real(0, high=10), {"0": 0.0, "10": 10.0}, ["10.1", "-0.1", "nan", "inf"]),
        (one_of("a", "b"), {"a": "a"}, ["c", "A", ""]),
    ],
)
def test_parsers_take_what_is_in_range_and_name_what_is_not(
    parse: Any, good: dict[str, Any], bad: list[str]
) -> None:
    for text, value in good.items():
        assert parse(text) == value
        assert parse(value) == value  # a default passes through too
    for text in bad:
        with pytest.raises(BadParameter, match="is not"):
            parse(text)


def test_errors_of_the_system_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="absent: No such file"), as_bad_input():
        (tmp_path / "absent").read_text()
    with pytest.raises(ZeroDivisionError), as_bad_input():
        _ = 1 // 0


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    interrupted = replacing(path)
    interrupted.__enter__().write_text("ne")
    assert interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is not True
    assert path.read_text() == "old"
    with replacing(path) as fresh:
        fresh.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
