"""Errors in the form OpenAI's clients expect, and bodies that are refused with them."""

from __future__ import annotations

from typing import Any, TypeVar

from areal.api.io_struct import NO_ROOM
from areal.api.json_text import JsonError, loads_object
from areal.utils.http_body import Body, parse

M = TypeVar("M", bound=Body)

# Of other statuses: the request is invalid below 500, else a server error.
_TYPES = {429: "rate_limit_error"}
_CODES = {401: "invalid_api_key"}


class WireError(Exception):
    """`param` is the invalid field of the request; `code` is machine-readable."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def error_body(err: WireError) -> dict[str, Any]:
    fallback = "invalid_request_error" if err.status < 500 else "server_error"
    return {
        "error": {
            "message": err.message,
            "type": _TYPES.get(err.status, fallback),
            "param": err.param,
            "code": err.code or _CODES.get(err.status),
        }
    }


def refusal(message: str) -> WireError:
    """The engine refuses the request: too long, an option it does not have."""
    code = "context_length_exceeded" if NO_ROOM in message else None
    return WireError(400, message, code=code)


def loads_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request, or WireError."""
    try:
        return loads_object(data)
    except JsonError as error:
        raise WireError(400, str(error), error.field) from None


def parse_body(model: type[M], content: Any) -> M:
    """`parse` with OpenAI's and Anthropic's kind of error."""
    try:
        return parse(model, content)
    except JsonError as error:
        raise WireError(400, str(error), error.field) from None
