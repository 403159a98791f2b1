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

from areal.api.json_text import loads_object
from areal.engine.native.route_schemas import GROUP, UPDATE
from areal.engine.native.weight_loader import KINDS, Order, WeightInbox
from areal.engine.native.wire import field
from areal.utils.http_server import read_body
from areal.utils.route_schema import json_body
from areal.weight_sync.collective import GroupPlace

_MAX_TEXT = 4096  # characters: the longest path of Linux
_MAX_WORLD = 1 << 16
_MAX_VERSION = (1 << 31) - 1  # trajectories store versions as int32
_MAX_TIMEOUT_S = 86_400


def add_weight_routes(app: FastAPI, inbox: WeightInbox) -> None:
    @app.post("/init_weights_group", openapi_extra=json_body(GROUP))
    async def init_weights_group(request: Request) -> dict[str, str]:
        place = _place(loads_object(await read_body(request)))
        await asyncio.to_thread(inbox.join, place)
        return {"group": place.name}

    @app.post("/update_weights", openapi_extra=json_body(UPDATE))
    async def update_weights(request: Request) -> dict[str, int]:
        order = _order(loads_object(await read_body(request)))
        await asyncio.to_thread(inbox.take, order)
        return {"version": order.version}


def _place(content: dict[str, Any]) -> GroupPlace:
    backend = field(content, "backend", str)
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend: expected nccl or gloo, got {backend[:60]!r}")
    world_size = _integer(content, "world_size", 2, _MAX_WORLD)
    return GroupPlace(
        name=_text(content, "name"),
        host=_text(content, "host"),
        port=_integer(content, "port", 1, 65535),
        rank=_integer(content, "rank", 1, world_size - 1),  # 0 sends
        world_size=world_size,
        backend=backend,
        timeout_s=_timeout(content),
    )


def _order(content: dict[str, Any]) -> Order:
    kind = field(content, "kind", str, default="folder")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind[:60]!r}")
    place = "group" if kind == "xccl" else "path"
    return Order(
        kind=kind,
        **{place: _text(content, place)},
        key=field(content, "key", str, default=""),
        version=_integer(content, "version", 0, _MAX_VERSION),
        recompute_kv=field(content, "recompute_kv", bool, default=True),
    )


def _text(content: dict[str, Any], name: str) -> str:
    value = field(content, name, str)
    if not value or "\0" in value or len(value) > _MAX_TEXT:
        raise ValueError(
            f"{name}: expected 1 to {_MAX_TEXT} characters, none of them NUL, got {value[:60]!r}"
        )
    return value


def _integer(content: dict[str, Any], name: str, low: int, high: int) -> int:
    value = field(content, name, int)
    if not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {value!r:.60}")
    return value


def _timeout(content: dict[str, Any]) -> float:
    value = content.get("timeout_s")
    is_bool = isinstance(value, bool)
    if is_bool or not isinstance(value, int | float) or not 0 < value <= _MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s: expected seconds, above 0 and at most {_MAX_TIMEOUT_S}, got {value!r:.60}"
        )
    return float(value)
