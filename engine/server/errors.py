"""What goes wrong, in the body that OpenAI's clients understand."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

logger = logging.getLogger(__name__)
SHOWN_CHARS = 200


class ApiError(Exception):
    """An answer other than success: status, message, and where known which parameter and a code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's ``type``."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 503:
            return "service_unavailable_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def content(self) -> bytes:
        """The JSON body. ASCII, so that whatever text a client sent can be told back to it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> Response:
        """The whole answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 413:
            headers["Connection"] = "close"  # the rest of the body is never read
        return Response(self.content(), self.status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A mistake of the client."""
    return ApiError(400, message, param=param, code=code)


def engine_dead(status: int) -> ApiError:
    """The engine has stopped. Why is for its operator, in the log: what devices and libraries say helps no client."""
    return ApiError(
        status,
        "the engine has stopped and the server is going down; send the request to another, or retry later",
        code="engine_dead",
    )


def shown(value: Any) -> str:
    """A value of a client, short enough for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"


def install(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's form."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths, wrong methods, bodies it cannot read."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; see /openapi.json for what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; use {allowed}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says more").response()


def from_validation(errors: Any) -> ApiError:
    """The first of pydantic's errors as one sentence; those of a union's other members are left out."""
    first = errors[0]
    if first["type"] == "json_invalid":
        where = first["loc"][-1] if len(first["loc"]) > 1 else 0
        return bad_request(f"the body is no JSON: {first['ctx']['error']} at character {where}; correct it")
    names = [str(part) for part in first["loc"] if part != "body" and not _is_type_name(part)]
    if not names:
        found, wanted = shown(first.get("input")), "send a JSON object, with Content-Type: application/json"
        return bad_request(f"the body is or has {found}, which cannot be read; {wanted}")
    name = names[0] + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in names[1:])
    if first["type"] == "missing":
        return bad_request(f"{name} is missing; give it", name)
    wanted = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "value_error":
        return bad_request(wanted, name)
    return bad_request(f"{name} is {shown(first.get('input'))}: {wanted[0].lower()}{wanted[1:]}", name)


def _is_type_name(part: object) -> bool:
    """Whether a part of an error's place is pydantic's name for a member of a union, not a field."""
    text = str(part)
    return isinstance(part, str) and (not text.isidentifier() or text[0].isupper() or text in ("str", "int"))
