"""The tools of any MCP server: `async with mcp_tools({"command": "my-server"}) as tools: ...`."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import math
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic_core import to_json

from rllm._runtime.threads import EventLoopThread
from rllm.errors import ConfigError, MissingDependencyError, RLLMError, needed
from rllm.tools.tool_base import MAX_OUTPUT_CHARS, Tool, ToolOutput
from rllm.types import JSONMapping, JSONObject

if TYPE_CHECKING:
    from httpx2 import Response
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

__all__ = ["MCPConnection", "MCPServer", "MCPTool", "mcp_tools"]

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30.0
MAX_STDERR_BYTES = 2_000

CONNECTION_CLOSED = -32000, "Connection closed"
"""Error of the client for calls whose connection has ended.

Servers use the same code for their own errors, and so does the client if one HTTP response was cut off.
"""


@dataclass(frozen=True, kw_only=True)
class MCPServer:
    """One server, with the fields of the usual `mcpServers` configuration files: either `command` or `url`."""

    command: str = ""
    """Program that speaks MCP over its standard input and output."""
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Variables added to the few harmless ones that the server inherits."""
    cwd: str | None = None
    url: str = ""
    """Endpoint of a server that speaks streamable HTTP."""
    headers: dict[str, str] = field(default_factory=dict)
    name: str = ""
    """Name in error messages; by default the command line, or the URL without its query."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name!r}: give either `command` or `url`")
        if not self.name:
            parts = urlsplit(self.url)
            bare_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            object.__setattr__(self, "name", " ".join([self.command, *self.args]) if self.command else bare_url)

    @classmethod
    def of(cls, server: MCPServer | JSONMapping | str) -> MCPServer:
        """Return the server of a mapping with the fields above, or of a URL.

        Raises:
            ConfigError: if a key is not known.
        """
        if isinstance(server, MCPServer):
            return server
        if isinstance(server, str):
            return cls(url=server)
        known = {item.name for item in fields(cls)}
        if unknown := server.keys() - known:
            raise ConfigError(f"MCP server: unknown keys {sorted(unknown)}; use {sorted(known)}")
        return cls(**server)


class MCPTool(Tool):
    """One tool of a connected server, callable from any thread and event loop.

    `name` is the server's own, with characters that model servers do not allow replaced by `_`; `mcp_tools` numbers
    names that become equal.
    """

    def __init__(
        self,
        connection: MCPConnection,
        name: str,
        description: str,
        parameters: JSONObject,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        valid_name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
        super().__init__(valid_name, description, parameters=parameters, max_output_chars=max_output_chars)
        self._connection = connection
        self._remote_name = name

    def __reduce__(self) -> tuple[object, ...]:
        arguments = self._connection, self._remote_name, self.description, self._parameters, self.max_output_chars
        return MCPTool, arguments, {"name": self.name}

    async def async_forward(self, **arguments: object) -> ToolOutput:
        """Call the tool on its server."""
        try:
            result = await self._connection.call(self._remote_name, arguments)
        except MCPCallError as error:
            return ToolOutput(self.name, error=str(error))
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(parts)
        if result.is_error:
            server = self._connection.server.name
            return ToolOutput(self.name, error=f"MCP server {server!r}, tool {self._remote_name!r} reports: {text}")
        return ToolOutput(self.name, output=text)


@asynccontextmanager
async def mcp_tools(
    server: MCPServer | JSONMapping | str,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    max_output_chars: int = MAX_OUTPUT_CHARS,
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
    connection = MCPConnection(MCPServer.of(server), timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    try:
        yield await tools_of(connection, max_output_chars=max_output_chars)
    finally:
        await asyncio.to_thread(connection.close)


async def tools_of(connection: MCPConnection, *, max_output_chars: int = MAX_OUTPUT_CHARS) -> list[MCPTool]:
    """Return the tools of a connection, each with a name of its own; see `MCPConnection.list_tools`."""
    tools = [
        MCPTool(connection, listed.name, listed.description or "", listed.input_schema, max_output_chars)
        for listed in await connection.list_tools()
    ]
    taken: set[str] = set()
    for tool in tools:  # names such as `a.b` and `a_b` are now equal
        own, numbers = tool.name[:60], itertools.count(2)
        while tool.name in taken:
            tool.name = f"{own}_{next(numbers)}"
        taken.add(tool.name)
    return tools


class MCPCallError(Exception):
    """A call without a result; the message names the server, the tool and the remedy."""


class MCPConnection:
    """Connection to an MCP server that rollouts in any thread and event loop share.

    The client's cancel scopes must be entered and exited by one task, so the connection has an event loop in its own
    thread, and one task there that holds the client. If the server ended, the next call connects again.

    Args:
        server: the server.
        timeout_s: seconds within which a call must be answered.
        start_timeout_s: seconds within which the server must have listed its tools.
    """

    def __init__(self, server: MCPServer, *, timeout_s: float, start_timeout_s: float) -> None:
        self.server = server
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._thread = EventLoopThread(f"mcp {server.name}")
        self.closed = False
        """True once `close` was called."""
        self._ready: asyncio.Future[Client] | None = None
        """The client once it is connected; callers share the attempt to connect, and its failure."""
        self._holder: asyncio.Task[None] | None = None
        self._stderr: _StderrTail | None = None

    async def list_tools(self) -> list[ListedTool]:
        """Connect, and return the server's tools as `mcp` describes them.

        Raises:
            ConfigError: if the server cannot be started or reached, with the end of its standard error.
        """
        return await self._thread.run(self._list_tools)

    def __reduce__(self) -> tuple[object, ...]:
        """Let tools be sent to another process, which opens a connection of its own."""
        return shared_connection, (self.server, self.timeout_s, self.start_timeout_s)

    def close(self) -> None:
        """Cancel the calls that are under way, and end the server's process and the thread. Idempotent."""
        self.closed = True
        self._thread.close(self._disconnect)

    async def call(self, tool: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Call a tool and return its result.

        Raises:
            MCPCallError: if there is none.
        """
        try:
            to_json(arguments)
        except ValueError as error:  # such as half of an emoji, which would end the client and all other calls
            raise self._failure(tool, f"the arguments cannot be sent: {error}") from None
        try:
            return await self._thread.run(lambda: self._call(tool, dict(arguments)))
        except (RLLMError, MCPCallError):
            if not self.closed:
                raise
            reason = "the connection is closed; call tools inside `async with mcp_tools(...)`"
            raise self._failure(tool, reason) from None

    def _failure(self, tool: str, reason: str) -> MCPCallError:
        return MCPCallError(f"MCP server {self.server.name!r}, tool {tool!r}: {reason}")

    # The methods below run in the connection's own loop.

    async def _call(self, tool: str, arguments: dict[str, object]) -> CallToolResult:
        holder = None
        try:
            client = await self._connected()
            holder = self._holder
            async with asyncio.timeout(self.timeout_s):
                return await client.call_tool(tool, arguments)
        except TimeoutError:
            reason = f"no answer within {self.timeout_s:g} s; raise timeout_s, or find out why the server hangs"
        except ConfigError as error:
            raise self._failure(tool, str(error)) from None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if (getattr(error, "code", None), getattr(error, "message", None)) == CONNECTION_CLOSED:
                reason = "the server ended during the call; the next call connects again"
                if holder is self._holder:
                    await self._disconnect()
                elif holder is not None:  # another call is disconnecting; then all of standard error has arrived
                    await asyncio.wait([holder])
        raise self._failure(tool, reason + self._stderr_note())

    async def _list_tools(self) -> list[ListedTool]:
        client = await self._connected()
        tools: list[ListedTool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self.start_timeout_s):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except TimeoutError as error:
            raise self._not_started(f"it did not list its tools within {self.start_timeout_s:g} s") from error
        except Exception as error:
            raise self._not_started(f"it did not list its tools: {error}") from error

    async def _connected(self) -> Client:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._ready))
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        """Enter the client, stay until the connection ends, leave it: all in this one task."""
        import anyio

        stderr = self._stderr = _StderrTail()
        try:
            # Unlike asyncio's, this deadline does not interrupt a client that is ending its server.
            with anyio.fail_after(self.start_timeout_s) as start:
                async with open_client(self.server, stderr) as client:
                    start.deadline = math.inf
                    ready.set_result(client)
                    await asyncio.Event().wait()
        except Exception as error:
            if self._ready is ready:
                self._ready = None
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            reason = f"{type(cause).__name__}: {cause}"
            if start.cancel_called:
                reason = f"no answer within {self.start_timeout_s:g} s"
            if ready.done():
                logger.warning("the connection to MCP server %r ended: %s", self.server.name, reason)
                return
            stderr.close()  # so that its last output has arrived
            known = isinstance(cause, MissingDependencyError)
            ready.set_exception(cause if known else self._not_started(reason))
        finally:
            ready.cancel()  # unless it is done
            stderr.close()

    async def _disconnect(self) -> None:
        holder, self._holder, self._ready = self._holder, None, None
        if holder is not None:
            holder.cancel()
            await asyncio.wait([holder])

    def _not_started(self, reason: str) -> ConfigError:
        server = self.server
        if server.url:
            return ConfigError(
                f"MCP server {server.name!r} cannot be reached: {reason}; check that it is running at {server.url}"
            )
        command = shlex.join([server.command, *server.args])
        return ConfigError(
            f"MCP server {server.name!r} cannot be started: {reason}; try its command by hand: {command}"
            + self._stderr_note()
        )

    def _stderr_note(self) -> str:
        text = self._stderr.text if self._stderr else ""
        return f"; its standard error ends: {text}" if text else ""


_shared: dict[str, MCPConnection] = {}
_sharing = threading.Lock()


def shared_connection(
    server: MCPServer, timeout_s: float = CALL_TIMEOUT_S, start_timeout_s: float = START_TIMEOUT_S
) -> MCPConnection:
    """Return this process's connection to a server; it is closed when the process ends."""
    key = repr((server, timeout_s, start_timeout_s))
    with _sharing:
        found = _shared.get(key)
        if found is None or found.closed:
            found = _shared[key] = MCPConnection(server, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
            atexit.register(found.close)
        return found


class _StderrTail:
    """File for a process's standard error that keeps only the end of it."""

    def __init__(self) -> None:
        reading_end, writing_end = os.pipe()
        self.file = os.fdopen(writing_end, "w")
        self._tail = b""
        self._reader = threading.Thread(target=self._read, args=(reading_end,), name="mcp stderr", daemon=True)
        self._reader.start()

    def _read(self, reading_end: int) -> None:
        with os.fdopen(reading_end, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65_536):
                self._tail = (self._tail + chunk)[-MAX_STDERR_BYTES:]

    @property
    def text(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        self.file.close()
        self._reader.join(timeout=1)  # a child of the process may hold the pipe open for ever


@asynccontextmanager
async def open_client(server: MCPServer, stderr: _StderrTail) -> AsyncIterator[Client]:
    """Open a connected `mcp.Client`."""
    with needed("mcp", "mcp", "an MCP server's tools"):
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    async with AsyncExitStack() as stack:
        if server.command:
            process = StdioServerParameters(
                command=server.command,
                args=server.args,
                env=server.env,
                cwd=server.cwd,
                encoding_error_handler="replace",  # otherwise one byte that is not UTF-8 ends the client's reading
            )
            yield await stack.enter_async_context(Client(stdio_client(process, errlog=stderr.file)))
            return
        http = await stack.enter_async_context(
            httpx2.AsyncClient(
                headers={"accept-encoding": "identity", **server.headers},
                timeout=httpx2.Timeout(30, read=None),  # the connection has a deadline for each call
                limits=httpx2.Limits(),  # none: a call that waited too long for a free connection would end all calls
                event_hooks={"response": [_refuse_compressed, _end_unauthorized]},
            )
        )
        client = await stack.enter_async_context(Client(streamable_http_client(server.url, http_client=http)))
        http.event_hooks = {"response": [_refuse_compressed, _end_with_session]}
        yield client


async def _refuse_compressed(response: Response) -> None:
    """Close the client if a server compresses despite `identity`: the client would decompress without a limit."""
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise PermissionError(f"it answers with content-encoding={coding!r}; turn compression off for this client")


async def _end_unauthorized(response: Response) -> None:
    """Report why a server refuses the connection; the client only reports "an error response" for any status."""
    if response.status_code in (401, 403):
        body = (await response.aread()).decode(errors="replace").strip()
        raise PermissionError(f"it refuses these `headers` with HTTP status {response.status_code}: {body[:200]}")


async def _end_with_session(response: Response) -> None:
    """Close the client if the server no longer knows its session, as after a restart; only a new client helps.

    Servers should answer with status 404; many answer with 400.
    """
    request = response.request
    if request.method != "POST" or "mcp-session-id" not in request.headers:
        return
    if response.status_code == 404 or (response.status_code == 400 and b"session" in (await response.aread()).lower()):
        raise ConnectionError(f"the server no longer knows the session (HTTP status {response.status_code})")
