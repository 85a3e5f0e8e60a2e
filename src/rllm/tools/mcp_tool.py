"""The tools of any MCP server: `async with mcp_tools({"command": "my-server"}) as tools: ...`."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rllm.tools.mcp_connection import MCPCallError, MCPConnection, MCPServer
from rllm.tools.tool_base import Tool, ToolOutput

__all__ = ["MCPConnection", "MCPServer", "MCPTool", "mcp_tools"]

CALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30.0


class MCPTool(Tool):
    """One tool of a connected server, callable from any thread and event loop.

    `name` is the server's own, with characters that model servers do not allow replaced by `_`; `mcp_tools` numbers
    those that are then equal.
    """

    def __init__(
        self, connection: MCPConnection, name: str, description: str, parameters: dict[str, Any], **settings: Any
    ) -> None:
        super().__init__(re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64], description, parameters=parameters, **settings)
        self._connection = connection
        self._remote_name = name

    async def async_forward(self, **arguments: Any) -> ToolOutput:
        try:
            result = await self._connection.call(self._remote_name, arguments)
        except MCPCallError as error:
            return ToolOutput(self.name, error=str(error))
        if result.is_error:
            server = self._connection.server.name
            text = f"MCP server {server!r}, tool {self._remote_name!r} reports: {_text(result)}"
            return ToolOutput(self.name, error=text)
        return ToolOutput(self.name, output=_text(result))


@asynccontextmanager
async def mcp_tools(
    server: MCPServer | Mapping[str, Any] | str,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    max_output_chars: int | None = None,
) -> AsyncIterator[list[MCPTool]]:
    """Open the tools of a server.

    The server is `{"command": ..., "args": [...], "env": {...}}`, `{"url": ..., "headers": {...}}`, or a URL. The tools
    share one connection, and work in every thread and event loop until the context is left.

    Args:
        server: the server.
        timeout_s: seconds until a call must be answered.
        start_timeout_s: seconds until the server must have started.
        max_output_chars: limit of an output, as for every tool.

    Raises:
        ConfigError: if the server cannot be started or reached, with the end of its standard error.
        MissingDependencyError: without the package `mcp`.
    """
    settings = {} if max_output_chars is None else {"max_output_chars": max_output_chars}
    connection = MCPConnection(MCPServer.of(server), timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    try:
        listed = await asyncio.to_thread(connection.open)
        yield _number_duplicates(
            [MCPTool(connection, tool.name, tool.description or "", tool.input_schema, **settings) for tool in listed]
        )
    finally:
        await asyncio.to_thread(connection.close)


def _number_duplicates(tools: list[MCPTool]) -> list[MCPTool]:
    """Return the tools with a number after names that repeat, as `a.b` and `a_b` do."""
    taken: set[str] = set()
    for tool in tools:
        own, numbers = tool.name[:60], itertools.count(2)
        while tool.name in taken:
            tool.name = f"{own}_{next(numbers)}"
        taken.add(tool.name)
    return tools


def _text(result: Any) -> str:
    """Return the text for the model: the text parts, and the kind of every other part."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if parts or result.structured_content is None:
        return "\n".join(parts)
    return json.dumps(result.structured_content, ensure_ascii=False)
