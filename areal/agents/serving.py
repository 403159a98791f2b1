"""An HTTP server on the event loop of its caller, and the key that a request presents.

server = AppServer("127.0.0.1", 0)
await server.start(app)                  # returns when requests are accepted
server.url                               # http://127.0.0.1:PORT
await server.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from fastapi import FastAPI, Request

from areal.utils.addresses import bind, reachable_url
from areal.utils.http_server import server_config

_KEEP_ALIVE_S = 5  # of idle connections


class AppServer:
    """Listens from `start` to `stop`; `url` is known from then on, also of port 0."""

    def __init__(self, host: str, port: int, advertise_url: str | None = None) -> None:
        self._host = host
        self._port = port
        self._advertise_url = advertise_url
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def local_url(self) -> str:
        """Where it listens."""
        return reachable_url(self._host, self._port)

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._advertise_url or self.local_url

    async def start(self, app: FastAPI) -> None:
        """Returns when requests are accepted."""
        listener = self._bind()
        self._port = listener.getsockname()[1]
        self._server = server = _Server(server_config(app, keep_alive_s=_KEEP_ALIVE_S))
        self._serving = asyncio.create_task(server.serve(sockets=[listener]), name="agents")
        while not server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the server for agents ended while it was starting")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    def _bind(self) -> socket.socket:
        try:
            return bind(self._host, self._port)
        except OSError as error:
            raise ValueError(f"rollout.agent.host, rollout.agent.port: {error.strerror}") from None


class _Server(uvicorn.Server):
    """Leaves signal handling to the hosting process."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def key_of(request: Request) -> str:
    """The key that a request presents, in a header or in its path."""
    if (key := request.scope.get("session_key")) is not None:
        return key
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
