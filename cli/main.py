"""The ``pagedserve`` command: one small file a command, joined here."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Exit, Option, Typer, echo

import pagedserve
from pagedserve.cli import demo, generate, profile, replay, report, serve, simulate, validate
from pagedserve.cli.errors import EXIT_INTERRUPTED, OneLineGroup
from pagedserve.cli.option_groups import grouped
from pagedserve.cli.traces import traces

HELP = """Serve LLM requests with a scheduling policy, on a device or on a clock.

\b
Examples:
  pagedserve demo
  pagedserve generate --model smollm2-135m "The capital of France is"
  pagedserve serve --model smollm2-135m
  pagedserve simulate --trace sample:azure_shaped_500 --rate 40 --policy mixed --policy prefill_first
  pagedserve traces info conv.csv
  pagedserve report runs --plots pictures
"""
app = Typer(
    name="pagedserve",
    cls=OneLineGroup,
    help=HELP,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"pagedserve {pagedserve.__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


app.command("demo", help=demo.HELP)(grouped(demo.demo))
app.command("generate", help=generate.HELP)(grouped(generate.generate))
app.command("profile", help=profile.HELP)(grouped(profile.profile))
app.command("serve", help=serve.HELP)(grouped(serve.serve))
app.command("simulate", help=simulate.HELP)(grouped(simulate.simulate))
app.command("replay", help=replay.HELP)(grouped(replay.replay))
app.command("validate", help=validate.HELP)(grouped(validate.validate))
app.add_typer(traces)
app.command("report", help=report.HELP)(grouped(report.report))


def main() -> None:
    """The console script; exits with 0, 2 (bad input) or 130 (interrupted)."""
    try:
        app(prog_name="pagedserve")
    except KeyboardInterrupt:  # before the command began, or while it ended
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
