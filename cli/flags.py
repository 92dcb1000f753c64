"""Options by the names that people type, where the rest of the code knows the names of fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

FORM = "structured_outputs"


def flags_of(annotations: Mapping[str, Any]) -> dict[str, str]:
    """Each option's own flag by the name of its field; arguments have none."""
    found: dict[str, str] = {}
    for name, annotation in annotations.items():
        for info in get_args(annotation)[1:]:
            if isinstance(info, OptionInfo):
                # In an annotation the first name is where a default would be.
                names = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
                long = [text for text in names if text.startswith("--")]
                found[name] = long[0].split("/")[0] if long else "--" + name.replace("_", "-")
    return found


def given(group: Any, names: Collection[str] | None = None) -> list[str]:
    """Flags of a group's options that are not what they are by default; ``names``: of these alone."""
    flags = flags_of(get_type_hints(type(group), include_extras=True))
    return [
        flags[field.name]
        for field in fields(group)
        if (names is None or field.name in names)
        and field.default is not MISSING
        and getattr(group, field.name) != field.default
    ]


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A refusal in the words of its fields, told in those of the command line.

    ``flags``: of the command's options, by the names of fields. A name of several words is a field's wherever it
    stands alone: not quoted, and no part of a path or of a dotted name. One word may be just a word, and is taken
    for a field's where the message begins with it and says what it is or has.
    """
    for name in re.findall(rf"\b{FORM}\.(\w+)", message):
        if (form := flags.get(f"guided_{name}")) is not None:
            message = message.replace(f"{FORM}.{name}", form)
    if "guided_json" in flags:
        message = re.sub(rf"\b{FORM}\b", "a --guided form", message)
    several = "|".join(re.escape(name) for name in flags if "_" in name)
    one = "|".join(re.escape(name) for name in flags if "_" not in name)
    if several:
        message = re.sub(
            rf"(?<![\w./'\"-])({several})(?![\w/'\"-]|\.\w)", lambda found: flags[found[1]], message
        )
    if one:
        message = re.sub(rf"\A({one})(?=\[\d+\] is | is | has )", lambda found: flags[found[1]], message)
    return message
