"""Shared parts of all HTTP servers of areal: connections, request bodies, replies.

    app = new_app()                                  # no redirects, replies that can be encoded
    body = await read_body(request)                  # bounded
    trust(scope)                                     # this connection has presented a valid key
    uvicorn.Server(server_config(app, keep_alive_s=75))

A connection is a stranger until a request on it has presented a valid key. `ConnectionLimits`:

- Headers, and then the body, must each arrive within `request_s`, else the connection is closed; a
  trusted client gets more time for a body, by `min_rate`.
- A stranger may idle for `request_s` between requests; others for the server's keep-alive.
- Above `max_strangers` the oldest one is closed, so clients with a key can always connect.
- A quarter of the process's file descriptors is reserved for other uses.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from areal.api.json_text import dumps
from areal.utils import logging
from areal.utils.fs import raise_file_limit

logger = logging.getLogger("HttpServer")

SILENCE_S = 10.0  # until a stream of events shows that it is alive
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
CLIENT_LEFT = 499  # status that no client reads
_MAX_BODY = 256 << 20  # bytes: hundreds of prompts of the longest context
# Of a body too large that is thrown away, so that its sender reads why: a connection that is closed
# while it sends may take the answer with it.
_MAX_UNREAD = 32 << 20
_MAX_FILES = 1 << 20  # if the limit of file descriptors is "none"
_BACKLOG = 2048  # connections that wait to be accepted
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that clients close them
_SHUTDOWN_S = 1  # for streams open at shutdown
_SWEEP_S = 1.0
_WARN_S = 60.0  # between two log lines about closed connections


class JsonReply(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


def new_app(**options: Any) -> FastAPI:
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        # A redirect would follow the client's Host header.
        redirect_slashes=False,
        default_response_class=JsonReply,
        **options,
    )
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    return app


def add_hello(app: FastAPI) -> None:
    """Where clients look whether somebody is there."""
    for path in ("/", "/api/hello"):
        app.add_api_route(path, _hello, methods=["GET", "HEAD"], include_in_schema=False)


async def _hello() -> dict[str, str]:
    return {"server": "areal"}


class OneV1:
    """Middleware for clients whose base URL ends with /v1, and who add it themselves: their
    /v1/v1/... is /v1/..."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").startswith("/v1/v1/"):
            # In place: error handlers outside of this middleware look at the path too.
            scope["path"] = scope["path"].removeprefix("/v1")
        await self._app(scope, receive, send)


async def read_body(request: Request, max_bytes: int = _MAX_BODY) -> bytes:
    """HTTPException 413 if it is too large."""
    refusal = HTTPException(413, f"expected a body of at most {max_bytes} bytes")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes + _MAX_UNREAD:
            raise refusal
    if size > max_bytes:
        raise refusal
    return b"".join(chunks)


def trust(scope: MutableMapping[str, Any]) -> None:
    """The request of this ASGI scope has presented a valid key."""
    connection = scope.get("state", {}).get("connection")
    if connection is not None:  # None: not served by `server_config`
        connection.trust()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    request_s: float = 20.0
    min_rate: float = 16 << 10  # bytes per second of a body
    max_strangers: int | None = None  # default: 3/8 of the file descriptors


def server_config(
    app: FastAPI, *, keep_alive_s: int, limits: ConnectionLimits | None = None
) -> uvicorn.Config:
    """Also raises the process's limit of open files to the maximum."""
    raise_file_limit()
    guard = _Guard(limits or ConnectionLimits())
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(_Connection, guard)),  # only called
        # uvicorn warns of malformed requests: any client could fill a disk with them.
        log_level="error",
        access_log=False,
        # asyncio accepts so many before any is looked at and may be closed. With no descriptor left
        # it fails for the rest of them, and logs each failure: so they are few of the reserve.
        backlog=max(1, min(_BACKLOG, _num_files() // 32)),
        lifespan="off",
        ws="none",
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


def serve(app: FastAPI, listener: socket.socket, *, on_ready: Callable[[], object]) -> None:
    """Answers until SIGINT or SIGTERM; calls `on_ready` once requests are accepted."""
    server = uvicorn.Server(server_config(app, keep_alive_s=_KEEP_ALIVE_S))

    async def run() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
        while not (server.started or task.done()):
            await asyncio.sleep(0.005)
        if server.started:
            listener.listen(_BACKLOG)  # the kernel's own queue costs no descriptors
            on_ready()
        await task

    asyncio.run(run())


def _num_files() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_FILES if files == resource.RLIM_INFINITY else files


class _Guard:
    """Closes connections of one server that exceed its limits. Runs on its event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._max_all = _num_files() * 3 // 4
        self._max_strangers = limits.max_strangers or self._max_all // 2
        self._all: dict[_Connection, None] = {}  # oldest first
        self._strangers: dict[_Connection, None] = {}  # likewise
        self._stood_s = 0.0  # total time the event loop was blocked
        self._is_sweeping = False
        self._num_closed = 0
        self._warn_at = 0.0

    def clock(self, loop: Any) -> float:
        """Stops while the event loop is blocked: then the server delays clients, not vice versa."""
        return loop.time() - self._stood_s

    def add(self, connection: _Connection) -> None:
        self._all[connection] = self._strangers[connection] = None
        if len(self._strangers) > self._max_strangers or len(self._all) > self._max_all:
            self._close(next(iter(self._strangers)))  # the new one if there is no other
        self._sweep_later(connection.loop)

    def on_trust(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)

    def remove(self, connection: _Connection) -> None:
        self._all.pop(connection, None)
        self._strangers.pop(connection, None)

    def _sweep_later(self, loop: Any) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(_SWEEP_S, self._sweep, loop, loop.time() + _SWEEP_S)

    def _sweep(self, loop: Any, due: float) -> None:
        self._is_sweeping = False
        self._stood_s += max(0.0, loop.time() - due)
        now = self.clock(loop)
        for connection in [one for one in self._all if one.is_late(now)]:
            self._close(connection)
        if self._num_closed and loop.time() >= self._warn_at:
            logger.warning(
                "closed %d connections that showed no key, or sent a request too slowly",
                self._num_closed,
            )
            self._num_closed, self._warn_at = 0, loop.time() + _WARN_S
        if self._all:
            self._sweep_later(loop)

    def _close(self, connection: _Connection) -> None:
        self._num_closed += 1
        self.remove(connection)
        connection.transport.abort()


class _Connection(H11Protocol):
    """Records since when it waits for the client. Hashed by identity."""

    def __init__(self, guard: _Guard, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}  # in each request's scope
        self.is_trusted = False
        self._guard = guard
        self._since = 0.0  # start of the wait for headers or body
        self._num_bytes = 0  # received since then

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_begins()
        self._guard.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_headers = self.conn.their_state is h11.IDLE
        if self.timeout_keep_alive_task is not None:  # a new request on an idle connection
            self._wait_begins()
        self._num_bytes += len(data)
        super().data_received(data)
        if was_headers and self.conn.their_state is h11.SEND_BODY:
            self._wait_begins()

    def on_response_complete(self) -> None:
        if self.conn.their_state is not h11.SEND_BODY:
            self._wait_begins()
        super().on_response_complete()

    def trust(self) -> None:
        if not self.is_trusted:
            self.is_trusted = True
            self._guard.on_trust(self)

    def is_late(self, now: float) -> bool:
        """Whether the server waits for the client, and for too long."""
        limits, state = self._guard.limits, self.conn.their_state
        is_idle = state is h11.IDLE and self.timeout_keep_alive_task is not None
        if state not in (h11.IDLE, h11.SEND_BODY) or self.flow.read_paused:
            return False
        if is_idle and self.is_trusted:
            return False  # the keep-alive timer applies
        credit_s = self._num_bytes / limits.min_rate if self.is_trusted else 0.0
        return now > self._since + limits.request_s + credit_s

    def _wait_begins(self) -> None:
        self._since, self._num_bytes = self._guard.clock(self.loop), 0


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)
