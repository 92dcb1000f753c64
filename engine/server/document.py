"""The OpenAPI document: which answers there are beside success, and what streams and metrics look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A chunk in JSON, or [DONE] at the end."}},
}
_ERRORS = {
    "400": "What was asked for makes no sense, or cannot be done here; the message says what to change.",
    "401": "A key is asked for, and none that is valid was sent.",
    "404": "The model is not served here.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "500": "The output failed.",
    "503": "The queue is full, or the server goes down; Retry-After says when to come back.",
    "504": "The request took longer than requests may.",
}
_OF_GET = ("401", "503")
_STREAMS = ("/v1/completions", "/v1/chat/completions")


def document(app: FastAPI) -> None:
    """Have ``app.openapi()`` say what the app answers, in place of the framework's 422 that it never does."""
    made: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        content = made()
        schemas = content.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas["Error"] = _ERROR
        for path, methods in content["paths"].items():
            for method, operation in methods.items():
                answers = operation["responses"]
                answers.pop("422", None)
                for status in _OF_GET if method == "get" else _ERRORS:
                    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
                    answers[status] = {"description": _ERRORS[status], "content": body}
                if path in _STREAMS:
                    answers["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
                if path == "/metrics":
                    answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
        return content

    app.openapi = openapi
