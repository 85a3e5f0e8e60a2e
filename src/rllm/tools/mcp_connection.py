"""One connection to an MCP server, which rollouts in any thread and any event loop share.

The client's cancel scopes must be entered and left by one task, so the connection has an event loop in a thread of its own,
and one task there that holds the client. A server that ended is connected to afresh at the next call.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import to_json

from rllm.errors import ConfigError, MissingDependencyError
from rllm.tools.mcp_server import MCPServer, StderrTail, open_client

__all__ = ["MCPCallError", "MCPConnection"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTION_CLOSED = -32000, "Connection closed"
"""What the client gives to calls whose connection has ended. Servers give errors of their own the same code, as does the
client where one HTTP response broke off."""


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
        """The server's `CallToolResult`.

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
        """The client. Where there is none, all who need one wait for the same attempt to connect, and share its failure."""
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
            stderr.close()  # so that the end of what it said is there
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
    """The first error inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
