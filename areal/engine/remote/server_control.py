"""Blocking calls to one inference server: health, pause, weights, statistics.

For the trainer's thread, which has no event loop. Each call opens its own connection, so calls may
come from several threads. Generation uses client.py instead.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from typing import Any

from areal.api.json_text import loads_object
from areal.utils.waits import waiting


class ServerError(RuntimeError):
    """An inference server is unreachable or returned an error; the message names it."""


class ServerLostError(ServerError):
    """No connection to the server, or it broke."""


class ServerRefusedError(ServerError):
    """The server is reachable and refused, with this HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return self.args[0]


class BadReplyError(ServerError):
    """A malformed reply, or one that cannot be trained on (api/io_struct.py)."""


class ServerEndedError(ServerRefusedError):
    """The server is reachable, but its engine has ended (503)."""


class ControlClient:
    """`address` is "host:port"; `kind` is the server's name in error messages."""

    def __init__(
        self, address: str, token: str, *, timeout_s: float, kind: str = "native server"
    ) -> None:
        self.address = address
        self.kind = kind
        self._token = token
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout_s = timeout_s

    def within(self, timeout_s: float) -> ControlClient:
        """The same server, with another limit on each call."""
        return ControlClient(self.address, self._token, timeout_s=timeout_s, kind=self.kind)

    def get(self, route: str, /, **query: Any) -> dict[str, Any]:
        return self._exchange_json("GET", _with_query(route, query), None)

    def get_text(self, route: str, /) -> str:
        return self._exchange("GET", route, None).decode("utf-8", "replace")

    def post(self, route: str, /, **order: Any) -> dict[str, Any]:
        """`route` may include a query; `order` is the body."""
        return self._exchange_json("POST", route, json.dumps(order).encode())

    def post_text(self, route: str, /, **order: Any) -> str:
        """For routes that return plain text."""
        return self._exchange("POST", route, json.dumps(order).encode()).decode("utf-8", "replace")

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Polls until the server answers; RuntimeError with the last cause on timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health")
                return
            except ServerError as err:
                # An error reply is final; no reply may be temporary.
                if isinstance(err, ServerRefusedError) or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def comes_back(self, timeout_s: float) -> bool:
        """Whether it answers again within this time after a lost connection."""
        try:
            self.wait_until_healthy(timeout_s)
        except ServerError:
            return False
        return True

    def is_healthy(self) -> bool:
        """Whether it reports healthy. A loading server may refuse or not answer."""
        try:
            self.get("/health")
        except ServerError:
            return False
        return True

    def is_there(self, timeout_s: float) -> bool:
        """Whether it answers at all, within this time."""
        try:
            self._exchange("GET", "/health", None, timeout_s=timeout_s)
        except ServerRefusedError:
            return True
        except ServerError:
            return False
        return True

    def _exchange_json(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        content = self._exchange(method, path, body)
        try:
            return loads_object(content or b"{}")  # some servers reply with an empty body
        except ValueError as err:
            what = f"{self.kind} {self.address}, {method} {path.split('?')[0]}"
            raise ServerError(f"{what}: malformed reply: {err}: {content[:200]!r}") from err

    def _exchange(
        self, method: str, path: str, body: bytes | None, *, timeout_s: float | None = None
    ) -> bytes:
        timeout_s = timeout_s or self._timeout_s
        what = f"{self.kind} {self.address}, {method} {path.split('?')[0]}"
        connection = http.client.HTTPConnection(self.address, timeout=timeout_s)
        try:
            with waiting(what):
                connection.request(method, path, body, self._headers)
                answer = connection.getresponse()
                content = answer.read()
        except TimeoutError:
            raise ServerError(f"{what}: no answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as err:
            raise ServerLostError(f"{what}: {type(err).__name__}: {err}") from err
        finally:
            connection.close()
        if answer.status != 200:
            fault = f"{what}: {answer.status}: {error_text(content)}"
            refused = ServerEndedError if answer.status == 503 else ServerRefusedError
            raise refused(fault, answer.status)
        return content


def error_text(content: bytes | str) -> str:
    """The error message of a reply: our `{"error": text}`, others' `{"error": {"message"}}`."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):  # a reply of a proxy or another program
        answer = None
    if not isinstance(answer, dict):
        return (content.decode("utf-8", "replace") if isinstance(content, bytes) else content)[:200]
    error = answer.get("error", answer)
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:2000]


def _with_query(route: str, query: dict[str, Any]) -> str:
    return f"{route}?{urllib.parse.urlencode(query)}" if query else route
