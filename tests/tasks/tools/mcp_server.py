"""An MCP server for tests: ``mcp_server.py [port]`` speaks HTTP, without a port standard input."""

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import ImageContent, TextContent

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def process() -> str:
    """Return the number of the server's process."""
    return str(os.getpid())


@server.tool(name="a.picture")
def picture() -> list[TextContent | ImageContent]:
    """Return a text and an image."""
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    return [TextContent(type="text", text="a cat"), image]


@server.tool()
def fails() -> str:
    """Raise an error."""
    raise ValueError("broken")


@server.tool(structured_output=False)
def long(characters: int) -> str:
    """Return a text of that length."""
    return "x" * characters


@server.tool()
async def slow(seconds: float) -> str:
    """Answer after some time."""
    await asyncio.sleep(seconds)
    return "late"


@server.tool()
async def stuck() -> str:
    """Stop the whole server for a minute."""
    time.sleep(60)
    return "never"


@server.tool()
def secret() -> str:
    """Repeat what the server should keep to itself."""
    return f"the token is {os.environ.get('DEMO_TOKEN')}"


if os.environ.get("DEMO_CHANGES") and Path(os.environ["DEMO_CHANGES"]).exists():
    server.remove_tool("add")

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
