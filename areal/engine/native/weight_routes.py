"""The routes by which a native server is given new weights.

| route                    | body                                               | answer          |
|--------------------------|----------------------------------------------------|-----------------|
| POST /init_weights_group | name, host, port, rank, world_size, backend,       | when all joined |
|                          | timeout_s                                          |                 |
| POST /update_weights     | kind=folder or delta: path, key=""; kind=xccl:     | when they serve |
|                          | group; version, recompute_kv=true                  |                 |

Status 409: the server lacks what the order builds on, the base of a delta or the group; 502: the
group broke.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request

from areal.engine.native.route_schemas import GROUP, UPDATE
from areal.engine.native.weight_inbox import KINDS, Order, WeightInbox
from areal.engine.native.wire import field, parse_object
from areal.utils.route_schema import json_body
from areal.weight_sync.collective import GroupPlace


def add_weight_routes(app: FastAPI, inbox: WeightInbox) -> None:
    @app.post("/init_weights_group", openapi_extra=json_body(GROUP))
    async def init_weights_group(request: Request) -> dict[str, str]:
        place = _place(parse_object(await request.body(), "body"))
        await asyncio.to_thread(inbox.join, place)
        return {"group": place.name}

    @app.post("/update_weights", openapi_extra=json_body(UPDATE))
    async def update_weights(request: Request) -> dict[str, int]:
        order = _order(parse_object(await request.body(), "body"))
        await asyncio.to_thread(inbox.take, order)
        return {"version": order.version}


def _place(content: dict[str, Any]) -> GroupPlace:
    place = GroupPlace(
        name=field(content, "name", str),
        host=field(content, "host", str),
        port=field(content, "port", int),
        rank=field(content, "rank", int),
        world_size=field(content, "world_size", int),
        backend=field(content, "backend", str),
        timeout_s=field(content, "timeout_s", float),
    )
    if place.backend not in ("nccl", "gloo"):
        raise ValueError(f"backend: expected nccl or gloo, got {place.backend!r}")
    if not 0 < place.rank < place.world_size:
        raise ValueError(
            f"rank: a receiver's lies between 1 and world_size - 1 ({place.world_size - 1}), "
            f"got {place.rank}"
        )
    return place


def _order(content: dict[str, Any]) -> Order:
    kind = field(content, "kind", str, default="folder")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    place = "group" if kind == "xccl" else "path"
    return Order(
        kind=kind,
        **{place: field(content, place, str)},
        key=field(content, "key", str, default=""),
        version=field(content, "version", int),
        recompute_kv=field(content, "recompute_kv", bool, default=True),
    )
