"""An MCP server for tests: ``mcp_server.py`` speaks by standard input.

``mcp_server.py ports`` reads lines with a port each, forks a server that speaks HTTP there, and
prints its process.
"""

import asyncio
import os
import signal
import sys

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
def secret() -> str:
    """Repeat what the server should keep to itself."""
    return f"the token is {os.environ.get('DEMO_TOKEN')}"


if sys.argv[1:] == ["ports"]:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if not (child := os.fork()):
            server.run("streamable-http", port=int(line))
            os._exit(0)
        print(child, flush=True)
else:
    server.run()
