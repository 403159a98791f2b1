"""Blocking calls to one native server: health, pause, weights, statistics.

For the trainer's thread, which has no event loop. Each call opens its own connection, so calls from
several threads do not meet. Generation does not go through here (remote_engine.py).
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from typing import Any


class ServerError(RuntimeError):
    """A native server cannot be reached, or answered with an error; the message says which."""


class ControlClient:
    """`address` is "host:port"."""

    def __init__(self, address: str, token: str, *, timeout_s: float) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout_s = timeout_s

    def get(self, route: str, /, **query: Any) -> dict[str, Any]:
        return self._exchange("GET", f"{route}?{urllib.parse.urlencode(query)}", None)

    def post(self, route: str, /, **order: Any) -> dict[str, Any]:
        return self._exchange("POST", route, json.dumps(order).encode())

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Asks until the server answers; RuntimeError with the last cause when it does not."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health")
                return
            except ServerError as err:
                # An answer with an error will not get better; silence may.
                if isinstance(err, ServerRefusedError) or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def _exchange(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        what = f"native server {self.address}, {method} {path.split('?')[0]}"
        connection = http.client.HTTPConnection(self.address, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            answer = connection.getresponse()
            content = json.loads(answer.read())
        except TimeoutError:
            raise ServerError(f"{what}: no answer within {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as err:
            raise ServerError(f"{what}: {type(err).__name__}: {err}") from err
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerRefusedError(f"{what}: {answer.status}: {content.get('error', content)}")
        return content


class ServerRefusedError(ServerError):
    """The server is there and said no."""
