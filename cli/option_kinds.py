"""Kinds of options that many commands have: what is taken and how it is written, whatever it is for."""

from __future__ import annotations

from typing import Any

from typer import Option

from pagedserve.cli.values import one_of, real, whole

SCALE = real(0, above=True)


def count(help: str, panel: str | None, *names: str, low: int = 1) -> Any:
    """A whole number of at least ``low``; ``names``: where the field's own is not the only one."""
    return Option(*names, parser=whole(low), metavar="N", help=help, rich_help_panel=panel)


def seconds(help: str, panel: str, *, above_0: bool = True) -> Any:
    """A time above 0, or at least 0."""
    return Option(parser=real(0, above=above_0), metavar="S", help=help, rich_help_panel=panel)


def microseconds(help: str, panel: str) -> Any:
    """A time of at least 0, and at most an hour."""
    return Option(parser=real(0, high=3_600e6), metavar="US", help=help, rich_help_panel=panel)


def factor(help: str, panel: str) -> Any:
    """What lengths or times are multiplied by."""
    return Option(parser=SCALE, metavar="S", help=help, rich_help_panel=panel)


def choice(help: str, panel: str, *words: str) -> Any:
    """One of these words."""
    return Option(parser=one_of(*words), metavar="|".join(words), help=help, rich_help_panel=panel)


def switch(name: str, help: str, panel: str | None) -> Any:
    """Given or not, with no opposite."""
    return Option(name, help=help, rich_help_panel=panel)
