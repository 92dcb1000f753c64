"""What form an output must have, as a request says it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 1 << 16
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One form that the whole output must have; names are vLLM's. The output ends where its form does.

    json: a JSON schema, as its text or as an object, which is kept as text. json_object: any JSON object.
    regex: a regular expression in the syntax of Rust's ``regex``, all of it to match. choice: one of these texts.
    grammar: a context-free grammar in Lark's syntax, or in llama.cpp's GBNF.

    ValueError unless exactly one is given, or for one that is too large.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _json_text(self.json))
        if not isinstance(self.json_object, bool):
            raise ValueError(
                f"structured_outputs.json_object is {self.json_object!r}; it must be true or false"
            )
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"structured_outputs has {found}; give exactly one of json, json_object, regex, choice, grammar"
            )
        for name in given:
            self._check_text(name)

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if name in ("regex", "grammar") and not isinstance(value, str):
            raise ValueError(f"structured_outputs.{name} is {value!r}; it must be text")
        length = sum(map(len, value)) if name == "choice" else len(value) if isinstance(value, str) else 0
        if length > MAX_CHARS:
            raise ValueError(f"structured_outputs.{name} has {length} characters; give {MAX_CHARS} at most")
        if name == "regex" and not value:
            raise ValueError("structured_outputs.regex is empty, so that no output fits: give a pattern")


def _choices(choice: Sequence[str]) -> tuple[str, ...]:
    if isinstance(choice, str):
        raise ValueError("structured_outputs.choice is a single text; give a list of at least one")
    texts = tuple(choice)
    if not texts:
        raise ValueError("structured_outputs.choice is empty, so that no output fits: give at least one text")
    if len(texts) > MAX_CHOICES:
        raise ValueError(f"structured_outputs.choice has {len(texts)} texts; give {MAX_CHOICES} at most")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValueError(f"structured_outputs.choice[{index}] is {text!r}; it must be text, not empty")
    return texts


def _json_text(schema: Any) -> str:
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"structured_outputs.json is {type(schema).__name__}; give a JSON schema: an object")
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.json is no JSON ({error}); correct it") from error
