"""McpClient: the part of MCP that tools need: initialize, tools/list, tools/call.

    client = await McpClient.connect(link, "files")
    client.tools                                  # Tool objects, for the model
    await client.call("read", {"path": "x"})      # the text for the model

A result with `isError` and an answer "invalid params" are the tool's answer to the model:
ToolError. Everything else that is not a well-formed result is an EnvError: the episode fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from areal import __version__
from areal.environments.interface import EnvError
from areal.environments.rpc import RpcError
from areal.environments.tools import Tool, ToolError

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # that we speak, newest first
MAX_RESULT_CHARS = 100_000
_MAX_PAGES = 100  # of tools
_INVALID_PARAMS = -32602


class Link(Protocol):
    """What carries the messages to a server and back."""

    @property
    def has_ended(self) -> bool: ...

    async def call(self, method: str, params: Mapping[str, Any]) -> Any: ...

    async def notify(self, method: str) -> None: ...

    async def close(self) -> None: ...


class McpClient:
    """Made by `connect`."""

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self.name = name
        self.tools: list[Tool] = []
        self.is_retired = False  # a call was given up on: nobody knows what the server still does

    @classmethod
    async def connect(cls, link: Link, name: str) -> McpClient:
        """Shakes hands and learns the tools. `link` is closed on failure."""
        self = cls(link, name)
        try:
            await self._initialize()
            self.tools = await self._list()
        except BaseException:
            await link.close()
            raise
        return self

    async def call(self, tool: str, /, **arguments: Any) -> str:
        try:
            result = await self.link.call("tools/call", {"name": tool, "arguments": arguments})
        except RpcError as error:
            if error.code == _INVALID_PARAMS:
                raise ToolError(str(error)) from error
            raise self._fault(f"{tool} failed: {error}") from error
        except asyncio.CancelledError:
            self.is_retired = True
            raise
        text = self._text(tool, result)
        if result.get("isError") is True:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        await self.link.close()

    async def _initialize(self) -> None:
        us = {"name": "areal", "version": __version__}
        params = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": us}
        answer = await self._ask("initialize", params)
        version = answer.get("protocolVersion")
        if version not in VERSIONS:
            raise self._fault(f"speaks version {version!r:.50}; we speak {', '.join(VERSIONS)}")
        await self.link.notify("notifications/initialized")

    async def _list(self) -> list[Tool]:
        tools: list[Tool] = []
        params: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            answer = await self._ask("tools/list", params)
            given = answer.get("tools")
            if not isinstance(given, list):
                raise self._fault(f"tools/list answered {answer!r:.200}")
            tools += [self._tool(one) for one in given]
            cursor = answer.get("nextCursor")
            if not cursor:
                return tools
            params = {"cursor": cursor}
        raise self._fault(f"lists more than {_MAX_PAGES} pages of tools")

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self.link.call(method, params)
        except RpcError as error:
            raise self._fault(f"{method} failed: {error}") from error
        if not isinstance(answer, dict):
            raise self._fault(f"{method} answered {answer!r:.200}")
        return answer

    def _tool(self, given: Any) -> Tool:
        name = given.get("name") if isinstance(given, dict) else None
        schema = given.get("inputSchema") if isinstance(given, dict) else None
        if not isinstance(name, str) or not isinstance(schema, dict):
            raise self._fault(f"offers a tool without name or inputSchema: {given!r:.200}")
        description = given.get("description")
        described = description if isinstance(description, str) else ""
        return Tool(name, described, schema, partial(self.call, name))

    def _text(self, tool: str, result: Any) -> str:
        content = result.get("content") if isinstance(result, dict) else None
        if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
            raise self._fault(f"{tool} answered {result!r:.200}, expected a list 'content'")
        parts = [
            one["text"] if isinstance(one.get("text"), str) else f"[{one.get('type')}]"
            for one in content
        ]
        if not parts and result.get("structuredContent") is not None:
            parts = [json.dumps(result["structuredContent"])]
        text = "\n".join(parts)
        if len(text) > MAX_RESULT_CHARS:
            return f"{text[:MAX_RESULT_CHARS]}\n[the text is longer]"
        return text

    def _fault(self, what: str) -> EnvError:
        return EnvError(f"MCP server {self.name}: {what}")
