"""An MCP server with well-behaved and faulty tools: `python mcp_server_script.py [PORT]`, on stdio without a port."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("manners", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(name="who.is")
def who_is() -> str:
    """Return the id and the environment of this process."""
    return f"{os.getpid()} {os.environ.get('GREETING')} {os.environ.get('API_KEY')}"


@server.tool()
def greet(context: Context) -> str:
    """Return the header of the request."""
    return context.headers.get("x-greeting", "") if context.headers else ""


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """End the process."""
    sys.stderr.write("dying words")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def flood() -> str:
    """Answer with a million characters, and write as many to the standard error."""
    sys.stderr.write("noise\n" * 170_000)
    return "x" * 1_000_000


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
