"""Connection to an MCP server that rollouts in any thread and event loop share.

The client's cancel scopes must be entered and exited by one task, so the connection has an event loop in its own
thread, and one task there that holds the client. If the server ended, the next call connects again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic_core import to_json

from rllm.errors import ConfigError, MissingDependencyError

__all__ = ["MCPCallError", "MCPConnection", "MCPServer"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTION_CLOSED = -32000, "Connection closed"
"""Error of the client for calls whose connection has ended.

Servers use the same code for their own errors, and so does the client if one HTTP response was cut off.
"""


class MCPCallError(Exception):
    """A call got no result; the message names the server, the tool and the remedy."""


class MCPConnection:
    """Connected by `open`, ended by `close`; both wait, so an event loop calls them in a thread.

    Args:
        server: where it is.
        timeout_s: seconds within which a call must be answered.
        start_timeout_s: seconds within which the server must have listed its tools.
    """

    def __init__(self, server: MCPServer, *, timeout_s: float, start_timeout_s: float) -> None:
        self.server = server
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp {server.name}", daemon=True)
        self._closed = False
        self._changing = asyncio.Lock()
        self._client: Any = None
        self._attempt: asyncio.Task[Any] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._holder: asyncio.Task[None] | None = None
        self._stderr: StderrTail | None = None
        self._thread.start()

    def open(self) -> list[Any]:
        """Connect, and give the server's tools as `mcp` describes them.

        Raises:
            ConfigError: if the server cannot be started or reached, with the end of its standard error.
        """
        try:
            return self._submit(self._tracked(self._list_tools())).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the calls that are under way, the server's process, and the thread."""
        if self._closed:
            return
        self._closed = True
        self._submit(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return the server's `CallToolResult`.

        Raises:
            MCPCallError: if there is none.
        """
        if self._closed:
            raise self._failure(tool, "the connection is closed; call tools inside `async with mcp_tools(...)`")
        try:
            to_json(arguments)
        except (
            ValueError
        ) as error:  # such as half of an emoji; trying to send it would end the client, and all calls with it
            raise self._failure(tool, f"the arguments cannot be sent: {error}") from None
        return await asyncio.wrap_future(self._submit(self._tracked(self._call(tool, dict(arguments)))))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _failure(self, tool: str, reason: str) -> MCPCallError:
        return MCPCallError(f"MCP server {self.server.name!r}, tool {tool!r}: {reason}")

    # What follows runs in the connection's own loop.

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await work
        finally:
            self._calls.discard(task)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        client = None
        try:
            client = await self._connected()
            async with asyncio.timeout(self.timeout_s):
                return await client.call_tool(tool, arguments)
        except TimeoutError:
            reason = (
                f"no answer within {self.timeout_s:g} s; raise timeout_s, or see why the server hangs{self._note()}"
            )
        except asyncio.CancelledError:
            if not self._closed:
                raise
            reason = "the connection was closed during the call"
        except Exception as error:
            reason = await self._describe(error, client)
        raise self._failure(tool, reason) from None

    async def _describe(self, error: Exception, client: Any) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        if (getattr(error, "code", None), getattr(error, "message", None)) != CONNECTION_CLOSED:
            return f"{type(error).__name__}: {error}{self._note()}"
        async with self._changing:
            if client is self._client:  # else another call has seen to it
                await self._disconnect()
            return f"the server ended during the call; the next call connects to it afresh{self._note()}"

    async def _list_tools(self) -> list[Any]:
        client = await self._connected()
        tools: list[Any] = []
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

    async def _connected(self) -> Any:
        """Return the client; concurrent callers share one attempt to connect, and its failure."""
        if self._client is not None:
            return self._client
        if self._attempt is None:
            self._attempt = self._loop.create_task(self._connect())
        return await asyncio.shield(self._attempt)

    async def _connect(self) -> Any:
        try:
            async with self._changing:
                await self._disconnect()
                self._client = await self._started()
                return self._client
        finally:
            self._attempt = None

    async def _started(self) -> Any:
        ready: asyncio.Future[Any] = self._loop.create_future()
        self._stderr = StderrTail()
        self._holder = self._loop.create_task(self._hold(ready, self._stderr))
        try:
            async with asyncio.timeout(self.start_timeout_s):
                return await ready
        except TimeoutError as error:
            await self._disconnect()
            raise self._not_started(f"no answer within {self.start_timeout_s:g} s") from error

    async def _hold(self, ready: asyncio.Future[Any], stderr: StderrTail) -> None:
        """Enter the client, stay until the connection ends, leave it: all in this one task."""
        try:
            async with open_client(self.server, stderr) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if self._holder is asyncio.current_task():
                self._client = None
            cause = _cause(error)
            if ready.done():
                logger.warning(
                    "the connection to MCP server %r ended: %s: %s", self.server.name, type(cause).__name__, cause
                )
                return
            stderr.close()  # so that its last output has arrived
            known = isinstance(cause, MissingDependencyError)
            ready.set_exception(cause if known else self._not_started(f"{type(cause).__name__}: {cause}"))

    async def _disconnect(self) -> None:
        holder, self._holder, self._client = self._holder, None, None
        if holder is not None:
            holder.cancel()
            with suppress(asyncio.CancelledError):
                await holder
        if self._stderr is not None:
            self._stderr.close()

    async def _end(self) -> None:
        tasks = [*self._calls, *([self._attempt] if self._attempt else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._disconnect()

    def _not_started(self, reason: str) -> ConfigError:
        server = self.server
        if server.url:
            return ConfigError(
                f"MCP server {server.name!r} cannot be reached: {reason}; is it running at {server.url}?"
            )
        command = shlex.join([server.command, *server.args])
        return ConfigError(
            f"MCP server {server.name!r} cannot be started: {reason}; try its command by hand: {command}{self._note()}"
        )

    def _note(self) -> str:
        return self._stderr.note() if self._stderr else ""


def _cause(error: BaseException) -> BaseException:
    """Return the first error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True, kw_only=True)
class MCPServer:
    """One server, with the fields of the usual `mcpServers` configuration files: either `command` or `url`."""

    command: str = ""
    """A program that speaks MCP over its standard input and output."""
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Added to the few harmless variables that the server inherits."""
    cwd: str | None = None
    url: str = ""
    """The endpoint of a server that speaks streamable HTTP."""
    headers: dict[str, str] = field(default_factory=dict)
    name: str = ""
    """Name in error messages; by default the command line, or the URL without its query."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name!r}: give either `command` or `url`")
        if not self.name:
            object.__setattr__(self, "name", " ".join([self.command, *self.args]) if self.command else _bare(self.url))

    @classmethod
    def of(cls, server: MCPServer | Mapping[str, Any] | str) -> MCPServer:
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
            raise ConfigError(f"MCP server: unknown keys {sorted(unknown)}; there are {sorted(known)}")
        return cls(**server)


def _bare(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class StderrTail:
    """Takes what a process writes to its standard error, and keeps the end of it."""

    MAX_BYTES = 2_000

    def __init__(self) -> None:
        reading_end, writing_end = os.pipe()
        self.file = os.fdopen(writing_end, "w")
        self._tail = b""
        self._reader = threading.Thread(target=self._read, args=(reading_end,), name="mcp stderr", daemon=True)
        self._reader.start()

    def _read(self, reading_end: int) -> None:
        with os.fdopen(reading_end, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65_536):
                self._tail = (self._tail + chunk)[-self.MAX_BYTES :]

    def note(self) -> str:
        """Return the end of standard error as a sentence to append to an error; empty if there is none."""
        text = self._tail.decode(errors="replace").strip()
        return f"; its standard error ends: {text}" if text else ""

    def close(self) -> None:
        """Stop waiting for the process: what it had written by its end is kept."""
        self.file.close()
        self._reader.join(timeout=1)  # a child of the process may hold the pipe open for ever


@asynccontextmanager
async def open_client(server: MCPServer, stderr: StderrTail) -> AsyncIterator[Any]:
    """Open a connected `mcp.Client`."""
    try:
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise MissingDependencyError.of("mcp", "mcp", "an MCP server's tools") from error
    async with AsyncExitStack() as stack:
        if server.command:
            process = StdioServerParameters(
                command=server.command,
                args=server.args,
                env=server.env,
                cwd=server.cwd,
                encoding_error_handler="replace",  # else the client reads no more after one byte that is not UTF-8
            )
            transport = stdio_client(process, errlog=stderr.file)
        else:
            timeout = httpx2.Timeout(30, read=None)  # the deadline of a call is the connection's affair
            limits = httpx2.Limits()  # none: a call that waited too long for others to end would end them all
            http = await stack.enter_async_context(
                httpx2.AsyncClient(
                    headers={"accept-encoding": "identity", **(server.headers or {})},
                    timeout=timeout,
                    limits=limits,
                    event_hooks={"response": [_refuse_compressed, _end_unauthorized]},
                )
            )
            transport = streamable_http_client(server.url, http_client=http)
        client = await stack.enter_async_context(Client(transport))
        if server.url:
            http.event_hooks = {"response": [_refuse_compressed, _end_with_session]}
        yield client


async def _refuse_compressed(response: Any) -> None:
    """Close the client if a server compresses despite `identity`: the client would decompress without a limit."""
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise PermissionError(f"it answers with content-encoding={coding!r}, and was asked for answers as they are")


async def _end_unauthorized(response: Any) -> None:
    """Report why a server refuses the connection; the client calls every status "an error response"."""
    if response.status_code in (401, 403):
        said = (await response.aread()).decode(errors="replace").strip()
        raise PermissionError(f"it refuses these `headers` with HTTP status {response.status_code}: {said[:200]}")


async def _end_with_session(response: Any) -> None:
    """Close the client if the server no longer knows its session, as after a restart; only a new client helps.

    Servers should answer with status 404; many answer with 400.
    """
    request = response.request
    if request.method != "POST" or "mcp-session-id" not in request.headers:
        return
    if response.status_code == 404 or (response.status_code == 400 and b"session" in (await response.aread()).lower()):
        raise ConnectionError(f"the server does not know the session any more (HTTP status {response.status_code})")
