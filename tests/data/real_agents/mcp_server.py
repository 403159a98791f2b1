"""A server made with the MCP SDK for Python: `python mcp_server.py` or `... http PORT`."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int = 0) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """A quotient."""
    return a / b


if len(sys.argv) > 1:
    server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
else:
    server.run()
