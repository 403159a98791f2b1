"""ASGI middleware that checks a server's token on every route, before any body is read.

The native server adds it to its app. A stock vLLM server checks its key under /v1 only, not on the
routes for pausing and weights, so it is started with
`--middleware areal.engine.remote.token_gate.VLLMTokenGate`. There it runs in the server's
environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

WRONG_TOKEN = "Authorization: expected 'Bearer TOKEN' with this server's token"


class TokenGate:
    """Requires `Authorization: Bearer TOKEN`, or `x-api-key: TOKEN` as Anthropic's clients send it.

    Compared in constant time.
    """

    def __init__(self, app: Any, token: str) -> None:
        self.app = app
        self._expected = {
            b"authorization": f"Bearer {token}".encode(),
            b"x-api-key": token.encode(),
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._has_token(dict(scope.get("headers", ()))):
            await self.admit(scope, receive, send)
        elif scope["type"] == "http":
            await self.refuse(scope, receive, send)
        else:  # a websocket
            await send({"type": "websocket.close", "code": 1008})

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        return any(
            name in headers and hmac.compare_digest(headers[name], expected)
            for name, expected in self._expected.items()
        )

    async def admit(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def refuse(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        error = {"message": WRONG_TOKEN, "type": "invalid_request_error", "code": "invalid_api_key"}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class VLLMTokenGate(TokenGate):
    """Uses the key that vLLM itself reads. Without one the server does not start."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, os.environ["VLLM_API_KEY"])
