"""`mcp_servers`: which MCP servers offer tools to the model, by name.

mcp_servers:
  files: {command: npx, args: [-y, some-server, /data], env: {LEVEL: "1"}}
  search: {url: "https://host/mcp", headers: {Authorization: "Bearer ..."}, shared: true}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

_EXPECTED = "a `command` to start (with args and env) or a `url` (with headers)"


@dataclass(frozen=True, slots=True)
class McpServer:
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    shared: bool = False  # one for all episodes, instead of one for each


def mcp_servers_of(given: Mapping[str, Any]) -> dict[str, McpServer]:
    """ValueError names the key that is wrong."""
    return {name: _server(f"mcp_servers.{name}", tree) for name, tree in given.items()}


def _server(key: str, tree: Any) -> McpServer:
    if not isinstance(tree, Mapping):
        raise ValueError(f"{key} must have {_EXPECTED}, got {tree!r:.100}")
    values = {str(name): value for name, value in cast("Mapping[Any, Any]", tree).items()}
    known = [one.name for one in fields(McpServer)]
    for name in values:
        if name not in known:
            raise ValueError(f"{key}.{name}: unknown key; expected {', '.join(known)}")
    if bool(values.get("command")) == bool(values.get("url")):
        raise ValueError(f"{key} must have {_EXPECTED}, and not both, got {sorted(values)}")
    for name, with_ in {"args": "command", "env": "command", "headers": "url"}.items():
        if values.get(name) and not values.get(with_):
            raise ValueError(f"{key}.{name} goes with {with_}, which is not set")
    url = values.get("url", "")
    if not isinstance(url, str) or (url and not url.startswith(("http://", "https://"))):
        raise ValueError(f"{key}.url must begin with http:// or https://, got {url!r:.100}")
    if not isinstance(values.get("shared", False), bool):
        raise ValueError(f"{key}.shared must be true or false, got {values['shared']!r:.100}")
    return McpServer(
        command=str(values.get("command", "")),
        args=tuple(_texts(f"{key}.args", values.get("args", ()))),
        env=_text_map(f"{key}.env", values.get("env", {})),
        url=url,
        headers=_text_map(f"{key}.headers", values.get("headers", {})),
        shared=values.get("shared", False),
    )


def _texts(key: str, given: Any) -> list[str]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{key} must be a list, got {given!r:.100}")
    return [str(one) for one in cast("Sequence[Any]", given)]


def _text_map(key: str, given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{key} must map names to texts, got {given!r:.100}")
    return {str(name): str(value) for name, value in cast("Mapping[Any, Any]", given).items()}
