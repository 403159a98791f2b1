"""One address for online clients of a run with rollout workers, on the controller's event loop.

    POST /rl/start_session   admin key     -> a worker that has a session, by the key of its entry
    any other route          session key   -> the worker of that session, unchanged

Sessions are sticky: a session's id, the public part of its key, begins with the id of the proxy
that has it. Workers are found by their entries (registry.py), which are read when a session starts;
workers that were replaced meanwhile are found then. Replies are passed on as they come, so a stream
stays one, and a client that leaves closes the worker's connection, too. Keys of sessions are
checked by the workers.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from areal.agents.proxy import error_reply, new_session_app, while_connected
from areal.agents.registry import ID_LENGTH, Entry, read_entries, session_id_of
from areal.agents.serving import AppServer, key_of
from areal.api.config.inference import AgentConfig
from areal.openai.errors import WireError
from areal.utils import logging
from areal.utils.http_server import JsonReply, read_body, trust

logger = logging.getLogger("AgentRouter")

_CONNECT_S = 10.0
# Of a connection, not of a message: not passed on.
_HOP_HEADERS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class AgentRouter:
    """Runs on the event loop of `start`. `folder` has the workers' entries."""

    _client: aiohttp.ClientSession  # while it runs

    def __init__(self, config: AgentConfig, *, admin_key: str, folder: Path) -> None:
        self.max_body = int(config.max_body_mb * (1 << 20))
        self._admin_key = admin_key
        self._folder = folder
        self._server = AppServer(config.host, config.port, config.advertise_url)
        self._workers: dict[str, Entry] = {}
        self._num_started = 0

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )
        try:
            await self._server.start(create_app(self))
        except BaseException:
            await self._client.close()
            raise
        logger.info("clients start sessions at %s", self.url)

    async def stop(self) -> None:
        await self._server.stop()
        await self._client.close()

    def check_admin(self, request: Request) -> None:
        if not hmac.compare_digest(key_of(request).encode(), self._admin_key.encode()):
            raise WireError(401, "expected 'Authorization: Bearer KEY' with the admin key")
        trust(request.scope)

    async def start_session(self) -> dict[str, Any]:
        """A session of the next worker that has one."""
        self._workers = {entry.id: entry for entry in read_entries(self._folder)}
        refusal = WireError(429, "no session can start now: the run has enough; ask again later")
        entries = list(self._workers.values())
        self._num_started += 1
        for i in range(len(entries)):
            entry = entries[(self._num_started + i) % len(entries)]
            headers = {"Authorization": f"Bearer {entry.key}"}
            address = f"{entry.url}/rl/start_session"
            try:
                async with self._client.post(address, headers=headers) as reply:
                    content = await reply.json()
                    status = reply.status
            except aiohttp.ClientError:
                continue  # the worker has ended; its entry stays if it was killed
            if status == 200:
                return {
                    **content,
                    "base_url": f"{self.url}/v1",
                    "session_url": f"{self.url}/sessions/{content['api_key']}",
                }
            if status != 429:
                raise WireError(status, content["error"]["message"])
        raise refusal

    def worker_of(self, key: str) -> Entry:
        entry = self._workers.get(session_id_of(key)[:ID_LENGTH])
        if entry is None:
            raise WireError(401, "expected 'Authorization: Bearer KEY' with the key of a session")
        return entry

    async def forward(
        self, entry: Entry, request: Request, body: bytes, scope: Scope, send: Send
    ) -> None:
        headers = {k: v for k, v in request.headers.items() if k not in _HOP_HEADERS}
        headers["authorization"] = f"Bearer {key_of(request)}"  # also if it was in the path
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        url = f"{entry.url}{scope['path']}{query}"
        async with self._client.request(request.method, url, headers=headers, data=body) as reply:
            if reply.status != 401:
                trust(scope)
            raw = [(k.lower(), v) for k, v in reply.raw_headers]
            kept = [(k, v) for k, v in raw if k.decode() not in _HOP_HEADERS]
            await send({"type": "http.response.start", "status": reply.status, "headers": kept})
            async for data in reply.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def create_app(router: AgentRouter) -> FastAPI:
    app = new_session_app()

    @app.post("/rl/start_session")
    async def start_session(request: Request) -> Response:
        router.check_admin(request)
        return JsonReply(await router.start_session())

    async def forward(request: Request) -> Response:
        entry = router.worker_of(key_of(request))
        return _Forwarded(router, entry, request, await read_body(request, router.max_body))

    app.add_api_route("/{path:path}", forward, methods=["GET", "POST", "HEAD"])
    return app


class _Forwarded(Response):
    """A worker's reply, passed on while it comes."""

    def __init__(self, router: AgentRouter, entry: Entry, request: Request, body: bytes) -> None:
        super().__init__()
        self._router = router
        self._entry = entry
        self._request = request
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        work = self._router.forward(self._entry, self._request, self._body, scope, note)
        try:
            await while_connected(receive, work)
        except aiohttp.ClientError as error:
            if has_begun:  # the connection is closed, as the worker's was
                raise
            # Its sessions ended with it: their episodes run again elsewhere, with other keys.
            logger.warning("worker %s cannot be reached: %s", self._entry.id, error)
            gone = WireError(409, "the session has ended: its rollout worker is gone")
            await error_reply(self._request, gone)(scope, receive, send)
