"""An MCP server for tests: over standard input and output, or over HTTP on a given port."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Literal

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import INVALID_REQUEST

server = MCPServer("tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float, unit: Literal["s"] = "s") -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("nothing there")


@server.tool()
def who(context: Context) -> str:
    """Who calls."""
    return str((context.headers or {}).get("x-name"))


@server.tool()
def die() -> str:
    """Ends the server, without a word."""
    os._exit(1)


@server.tool()
def refuse(message: str) -> str:
    """Calls the request invalid."""
    raise MCPError(INVALID_REQUEST, message)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
