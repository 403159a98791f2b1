"""Toolbox: the MCP servers of a run, and what an episode gets of them.

    toolbox = Toolbox({"files": McpServer(command="npx", args=(...))})
    tools = await toolbox.open()          # of one episode: tools.tools, tools.close()
    toolbox.close()

An episode has servers of its own, so that what one sample changes no other sees; a `shared` server
is one for all, connected when it is first needed and again when it has ended. A call to it that is
given up on (a time-out) may have left it stuck: it gets no new episode, is closed when its other
episodes are over, and a new one takes its place.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from areal.api.config.mcp import McpServer
from areal.api.redact import is_secret
from areal.environments.interface import EnvError
from areal.environments.mcp.client import McpClient
from areal.environments.mcp.http import HttpLink
from areal.environments.per_loop import PerLoop
from areal.environments.rpc import RpcProcess
from areal.environments.tools import Tool


class Toolbox:
    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self._own = {name: one for name, one in servers.items() if not one.shared}
        self._shared = {
            name: PerLoop(partial(self._connect, name, one), _is_usable)
            for name, one in servers.items()
            if one.shared
        }
        self._processes: list[RpcProcess] = []
        self._num_users: Counter[McpClient] = Counter()  # episodes, by shared server

    async def open(self) -> EpisodeTools:
        """For one episode. EnvError if a server cannot be reached, or two tools share a name."""
        episode = EpisodeTools(self._leave)
        try:
            for name, server in self._own.items():
                client = await self._connect(name, server)
                episode.own.append(client)
                episode.add(client)
            for shared in self._shared.values():
                client = await shared.get()
                self._num_users[client] += 1
                episode.shared.append(client)
                episode.add(client)
        except BaseException:
            await episode.close()
            raise
        return episode

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()

    async def _leave(self, client: McpClient) -> None:
        self._num_users[client] -= 1
        if not self._num_users[client]:
            del self._num_users[client]
            if client.is_retired:
                await client.close()

    async def _connect(self, name: str, server: McpServer) -> McpClient:
        if server.url:
            return await McpClient.connect(HttpLink(server.url, server.headers, name), name)
        argv, env = [server.command, *server.args], {**_harmless(), **server.env}
        process = await RpcProcess.start(argv, name=f"MCP server {name}", env=env)
        self._processes = [one for one in self._processes if not one.has_ended] + [process]
        return await McpClient.connect(process, name)


class EpisodeTools:
    """`leave` is called with each shared server when the episode is over."""

    def __init__(self, leave: Callable[[McpClient], Awaitable[None]]) -> None:
        self.tools: list[Tool] = []
        self.own: list[McpClient] = []
        self.shared: list[McpClient] = []
        self._leave = leave
        self._offered_by: dict[str, str] = {}

    def add(self, client: McpClient) -> None:
        for tool in client.tools:
            first = self._offered_by.setdefault(tool.name, client.name)
            if first != client.name:
                raise EnvError(
                    f"mcp_servers: {first} and {client.name} both offer a tool {tool.name!r}: "
                    "leave one of them out"
                )
        self.tools += client.tools

    async def close(self) -> None:
        try:
            for client in self.own:
                await client.close()
        finally:
            while self.shared:
                await self._leave(self.shared.pop())


def _is_usable(client: McpClient) -> bool:
    return not client.is_retired and not client.link.has_ended


def _harmless() -> dict[str, str]:
    """A server gets keys from its own `env` only."""
    return {name: value for name, value in os.environ.items() if not is_secret(name, value)}
