"""The form that an output must have, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.flags import given

if TYPE_CHECKING:
    from pagedserve.engine.structured_outputs import StructuredOutputs

PANEL = "Form of the output (one of these)"


@dataclass(frozen=True, slots=True)
class FormOptions:
    """What `StructuredOutputs` takes, which checks it."""

    guided_json: Annotated[
        Path | None,
        Option(metavar="FILE", help="JSON that this JSON schema describes.", rich_help_panel=PANEL),
    ] = None
    guided_regex: Annotated[
        str | None,
        Option(metavar="PATTERN", help="Text that this pattern matches as a whole.", rich_help_panel=PANEL),
    ] = None
    guided_choice: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="One of these texts; give it several times.", rich_help_panel=PANEL),
    ] = None
    guided_grammar: Annotated[
        Path | None,
        Option(metavar="FILE", help="Text of this grammar, in Lark's or GBNF syntax.", rich_help_panel=PANEL),
    ] = None

    def form(self) -> StructuredOutputs | None:
        """As the engine takes it; None for any text. OSError or ValueError says what is wrong."""
        from pagedserve.engine.structured_outputs import StructuredOutputs

        if len(found := given(self)) > 1:
            refuse(f"{' and '.join(found)} ask for a form each; give one of them")
        form: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                text = value.read_text(encoding="utf-8") if isinstance(value, Path) else value
                form[field.name.removeprefix("guided_")] = text
        return StructuredOutputs(**form) if form else None
