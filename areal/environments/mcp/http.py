"""HttpLink: JSON-RPC with an MCP server over streamable HTTP.

Each message is a POST. The answer to a request is a JSON body, or a stream of events one of which
has its id; what else is in the stream is skipped, and a question of the server is answered by
another POST. Bodies and events have at most MAX_LINE_BYTES. Redirects are not followed, as headers
may hold a key. Whoever calls sets the deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from areal.api.redact import hide_secrets
from areal.environments.interface import EnvError
from areal.environments.rpc import MAX_LINE_BYTES, RpcError, answer_to, parsed

_CLOSE_S = 5.0
_SESSION = "Mcp-Session-Id"
_VERSION = "MCP-Protocol-Version"


class HttpLink:
    """One session; belongs to the event loop that is running."""

    has_ended = False  # the server's end is noticed by the next request

    def __init__(self, url: str, headers: Mapping[str, str], name: str) -> None:
        self._url = url
        self._name = name
        self._ids = itertools.count(1)
        self._headers = {
            **headers,
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result; RpcError if the answer is an error, EnvError if there is none."""
        number = next(self._ids)
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        async with self._post(request) as response:
            answer = await self._answer(response, number)
            if _SESSION in response.headers:
                self._headers[_SESSION] = response.headers[_SESSION]
        if "error" in answer:
            raise RpcError(answer["error"])
        result = answer.get("result")
        if method == "initialize" and isinstance(result, dict):
            self._headers[_VERSION] = str(result.get("protocolVersion"))
        return result

    async def notify(self, method: str) -> None:
        async with self._post({"jsonrpc": "2.0", "method": method}):
            pass

    async def close(self) -> None:
        """Tells the server, if it kept a session."""
        try:
            if _SESSION in self._headers:
                async with asyncio.timeout(_CLOSE_S):
                    await self._client.delete(self._url, headers=self._headers)
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass  # the server forgets sessions by itself
        finally:
            await self._client.close()

    @asynccontextmanager
    async def _post(self, message: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._client.post(
                self._url, json=message, headers=self._headers, allow_redirects=False
            ) as response:
                if not 200 <= response.status < 300:
                    said = hide_secrets((await response.content.read(500)).decode(errors="replace"))
                    raise EnvError(f"MCP server {self._name}: HTTP {response.status}: {said}")
                yield response
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EnvError(
                f"MCP server {self._name}: {self._url}: {type(error).__name__}: {error}"
            ) from error

    async def _answer(self, response: aiohttp.ClientResponse, number: int) -> dict[str, Any]:
        if response.content_type != "text/event-stream":
            answer = parsed(await self._body(response))
            if answer is not None and answer.get("id") == number:
                return answer
            raise EnvError(f"MCP server {self._name}: a body that does not answer the request")
        async for event in self._events(response):
            message = parsed(event)
            if message is None:
                continue
            if "method" in message:
                if "id" in message:
                    async with self._post({"jsonrpc": "2.0", **answer_to(message)}):
                        pass
            elif message.get("id") == number:
                return message
        raise EnvError(f"MCP server {self._name}: the stream ended without an answer")

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for data in response.content.iter_any():
            body += data
            if len(body) > MAX_LINE_BYTES:
                raise self._too_long()
        return bytes(body)

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The data of each event."""
        buffer, data = bytearray(), bytearray()
        async for received in response.content.iter_any():
            buffer += received
            *lines, rest = buffer.replace(b"\r\n", b"\n").split(b"\n")
            buffer = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    data += line[5:].removeprefix(b" ") + b"\n"
                elif not line and data:
                    yield bytes(data)
                    data.clear()
            if len(buffer) + len(data) > MAX_LINE_BYTES:
                raise self._too_long()

    def _too_long(self) -> EnvError:
        return EnvError(
            f"MCP server {self._name}: an answer of more than {MAX_LINE_BYTES >> 20} MiB"
        )
