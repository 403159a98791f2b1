"""What is wrong with a request, and how OpenAI's clients expect to be told."""

from __future__ import annotations

from typing import Any

_TYPES = {
    429: "rate_limit_error"
}  # other statuses: the caller's fault below 500, else the server's
_CODES = {401: "invalid_api_key"}


class WireError(Exception):
    """`param` is the field of the request at fault; `code` a name programs can test for."""

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
