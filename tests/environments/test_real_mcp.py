"""Tools of servers made with the MCP SDK for Python; `make test-agents` installs it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from areal.api.config.mcp import McpServer
from areal.environments.mcp.toolbox import Toolbox
from areal.environments.tools import ToolError
from areal.utils.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[2]
PYTHON = str(ROOT / ".venv-agents/bin/python")
SCRIPT = str(ROOT / "tests/data/real_agents/mcp_server.py")
WAIT_S = 900.0

pytestmark = pytest.mark.real_agents


async def use(server: McpServer) -> None:
    toolbox = Toolbox({"sums": server})
    async with asyncio.timeout(WAIT_S):
        episode = await toolbox.open()
        tools = {tool.name: tool for tool in episode.tools}
        assert tools["add"].description == "The sum of two numbers."
        assert tools["add"].parameters["required"] == ["a"]
        assert await tools["add"].function(a=2, b=3) == "5"
        with pytest.raises(ToolError, match="divide"):
            await tools["divide"].function(a=1, b=0)
        with pytest.raises(ToolError, match="valid integer"):
            await tools["add"].function(a="x")
        await episode.close()
    toolbox.close()


async def test_over_pipes():
    await use(McpServer(command=PYTHON, args=(SCRIPT,)))


async def test_over_http():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = ChildProcess([PYTHON, SCRIPT, "http", str(port)], name="MCP server")

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await asyncio.to_thread(child.wait_until, is_up, timeout_s=WAIT_S)
        await use(McpServer(url=f"http://127.0.0.1:{port}/mcp"))
    finally:
        child.terminate()
