"""Mistakes of the person at the keyboard: one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import typer
from typer.core import TyperGroup

# Click's base of all usage errors, found through the one of its classes that typer passes on: typer used to
# depend on click, and newer versions carry it inside.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class BadInput(Exception):
    """What was asked for cannot be done; the message says the value, the limit and what to do."""


class BadField(BadInput):
    """The same, in the words of what refused it, which may name its fields."""


@contextmanager
def as_bad_input() -> Iterator[None]:
    """Turn the errors that readers and specifications raise for wrong input into `BadInput`.

    Wrap the reading and checking of input in it and nothing else: a ValueError from inside a simulation is
    a bug, whose traceback should be seen.
    """
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise BadInput(f"{where}{error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"not UTF-8 text: {error}") from error
    except ValueError as error:
        raise BadField(str(error)) from error


def refuse(message: str) -> NoReturn:
    """Raise `BadInput`."""
    raise BadInput(message)


class OneLineGroup(TyperGroup):
    """A command group that tells every mistake in one line; without arguments it shows its help."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit with its code."""
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        extra["standalone_mode"] = False
        try:
            code = super().main(args, **extra)
        except BadInput as error:
            _tell(str(error))
            code = EXIT_BAD_INPUT
        except UsageError as error:
            usage: Any = error
            where = f" (see: {usage.ctx.command_path} --help)" if usage.ctx else ""
            _tell(usage.format_message(), where)
            code = EXIT_BAD_INPUT
        except (KeyboardInterrupt, typer.Abort):
            code = EXIT_INTERRUPTED
        if code == EXIT_INTERRUPTED:
            _tell("interrupted: what was being computed is lost, what was saved before is whole")
        sys.exit(code if isinstance(code, int) else 0)


def _tell(message: str, hint: str = "") -> None:
    """One line, whatever the message: file names and parsers may put line ends into it."""
    print("Error: " + " ".join(message.split()).rstrip(".") + hint, file=sys.stderr)
