"""The routes by which a native server is steered and watched.

| route                | body or query                    | answer                               |
|----------------------|----------------------------------|--------------------------------------|
| POST /pause          |                                  | when no step runs any more           |
| POST /continue       |                                  |                                      |
| POST /abort          | rid, or all=true                 | the number of requests ended         |
| POST /offload        | tags: weights, kv_cache; or all  | when their memory is free            |
| POST /onload         | likewise                         | when they are back                   |
| GET /health          |                                  | status, version, model, paused, device|
| GET /stats           |                                  | the engine's counters                |
| GET /busy_intervals  | ?since=UNIX_TIME                 | when steps ran, for traces           |
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from areal.api.json_text import loads_object
from areal.engine.native.loop import EngineLoop
from areal.engine.native.route_schemas import ABORT, TAGS
from areal.engine.native.wire import decode_tags, field
from areal.utils.device import device_identity
from areal.utils.http_server import JsonReply, read_body
from areal.utils.route_schema import json_body


def add_control_routes(app: FastAPI, loop: EngineLoop) -> None:
    @app.post("/pause")
    async def pause() -> dict[str, bool]:
        await asyncio.to_thread(loop.pause)
        return {"paused": True}

    @app.post("/continue")
    async def resume() -> dict[str, bool]:
        await asyncio.to_thread(loop.resume)
        return {"paused": False}

    @app.post("/abort", openapi_extra=json_body(ABORT))
    async def abort(request: Request) -> dict[str, int]:
        order = loads_object(await read_body(request))
        if field(order, "all", bool, default=False):
            field(order, "rid", str, default="")  # of no use then, but still no nonsense
            rids = None
        else:
            rids = [field(order, "rid", str)]
        return {"aborted": await asyncio.wrap_future(loop.abort(rids))}

    @app.post("/offload", openapi_extra=json_body(TAGS, required=False))
    async def offload(request: Request) -> dict[str, bool]:
        tags = decode_tags(await read_body(request))
        await asyncio.wrap_future(loop.call(lambda engine: engine.offload(tags)))
        return {"offloaded": True}

    @app.post("/onload", openapi_extra=json_body(TAGS, required=False))
    async def onload(request: Request) -> dict[str, bool]:
        tags = decode_tags(await read_body(request))
        await asyncio.wrap_future(loop.call(lambda engine: engine.onload(tags)))
        return {"offloaded": False}


def add_watch_routes(app: FastAPI, loop: EngineLoop, *, model: str) -> None:
    @app.get("/health")
    async def health() -> Response:
        content = {
            "version": loop.version,
            "model": model,
            "paused": loop.paused,
            "device": device_identity(loop.device),
        }
        if loop.failure is not None:
            cause = f"{type(loop.failure).__name__}: {loop.failure}"
            return JsonReply({"status": "failed", "error": cause, **content}, status_code=503)
        return JsonReply({"status": "ok", **content})

    @app.get("/stats")
    async def stats() -> dict[str, float]:
        return loop.stats()

    @app.get("/busy_intervals")
    async def busy_intervals(since: str = "0") -> dict[str, Any]:
        return {"intervals": loop.busy.since(_unix_time(since))}


def _unix_time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"since: expected seconds, got {text[:60]!r}") from None
