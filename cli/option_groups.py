"""Options shared by several commands, as frozen dataclasses: one field an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from pagedserve.cli.errors import BadField, BadInput
from pagedserve.cli.flags import flags_of, with_flags


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: a parameter whose type is a dataclass becomes one option a field.

    Fields are annotated with ``Annotated[type, typer.Option(...)]``; the command gets the dataclass back,
    whose construction may check the values. Two groups of one command must not share a field's name. Refusals
    that name fields are told with the command's flags.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            own = get_type_hints(groups[name], include_extras=True)
            parameters += [_parameter(field, own[field.name]) for field in fields(groups[name])]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    names = [parameter.name for parameter in parameters]
    assert len(names) == len(set(names)), f"{command.__name__}: two options share a name: {sorted(names)}"

    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    flags = flags_of(annotations)

    @wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        try:
            command(**values)
        except BadField as error:
            raise BadInput(with_flags(str(error), flags)) from error

    flat.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    flat.__annotations__ = annotations
    del flat.__wrapped__  # pyright: ignore[reportAttributeAccessIssue] - or its signature would be read
    return flat


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
