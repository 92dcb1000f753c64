"""The form that an output must have: three ways in which clients ask, one in which the engine takes it."""

from __future__ import annotations

import re
from typing import Any

from pagedserve.engine.server.errors import bad_request
from pagedserve.engine.server.schema import GenerationRequest, ResponseFormat
from pagedserve.engine.structured_outputs import StructuredOutputs

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def form_of(request: GenerationRequest) -> tuple[str, StructuredOutputs] | None:
    """The parameter that asks for a form, and the form; None for any text.

    `ApiError` 400 for more than one form, or none that can be.
    """
    asked = {name: getattr(request, name) for name in _GUIDED if getattr(request, name) is not None}
    fields = {name: {_GUIDED[name]: value} for name, value in asked.items()}
    if request.structured_outputs is not None:
        fields["structured_outputs"] = _given(request.structured_outputs.model_dump(by_alias=True))
    asked_format = request.response_format
    if (
        asked_format is not None
        and asked_format.json_schema is not None
        and asked_format.type != "json_schema"
    ):
        raise bad_request(
            f"response_format has a json_schema and the type {asked_format.type!r}; make the type json_schema",
            "response_format",
        )
    if asked_format is not None and asked_format.type != "text":
        fields["response_format"] = _response_format(asked_format)
    if not fields:
        return None
    if len(fields) > 1:
        raise bad_request(f"{' and '.join(fields)} ask for a form each; give one of them", next(iter(fields)))
    name, form = next(iter(fields.items()))
    try:
        return name, StructuredOutputs(**form)
    except ValueError as error:
        raise bad_request(told_of(name, str(error)), name) from error


def told_of(name: str, message: str) -> str:
    """What the engine says of a form, in terms of the parameter that asked for it."""
    own = "structured_outputs"
    return message if name == own else re.sub(rf"\b{own}(\.\w+)?", name, message)


def _given(form: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in form.items() if value is not None}


def _response_format(asked: ResponseFormat) -> dict[str, Any]:
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.json_schema is None:
        raise bad_request(
            'response_format has the type "json_schema" and no json_schema; add one, with a name and a schema',
            "response_format",
        )
    return {"json": asked.json_schema.form}
