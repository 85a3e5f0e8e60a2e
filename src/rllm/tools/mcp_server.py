"""Where an MCP server is: a command to start, or a URL."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from rllm.errors import ConfigError, MissingDependencyError

__all__ = ["MCPServer", "StderrTail", "open_client"]


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
    """How errors call it; by default the command line, or the URL without its query."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name!r}: give either `command` or `url`, not both and not neither")
        if not self.name:
            object.__setattr__(self, "name", " ".join([self.command, *self.args]) if self.command else _bare(self.url))

    @classmethod
    def of(cls, server: MCPServer | Mapping[str, Any] | str) -> MCPServer:
        """The server of a mapping with the fields above, or of a URL.

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
        """The end, as a sentence to append to an error; empty where there is none."""
        text = self._tail.decode(errors="replace").strip()
        return f"; its standard error ends: {text}" if text else ""

    def close(self) -> None:
        """Stop waiting for the process: what it had written by its end is kept."""
        self.file.close()
        self._reader.join(timeout=1)  # a child of the process may hold the pipe open for ever


@asynccontextmanager
async def open_client(server: MCPServer, stderr: StderrTail) -> AsyncIterator[Any]:
    """A connected `mcp.Client`."""
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
    """End the client where a server compresses what was asked for as it is: the client would unpack it without bound."""
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise PermissionError(f"it answers with content-encoding={coding!r}, and was asked for answers as they are")


async def _end_unauthorized(response: Any) -> None:
    """Tell why a server takes no connection from us: the client calls every status "an error response"."""
    if response.status_code in (401, 403):
        said = (await response.aread()).decode(errors="replace").strip()
        raise PermissionError(f"it refuses these `headers` with HTTP status {response.status_code}: {said[:200]}")


async def _end_with_session(response: Any) -> None:
    """End the client where the server has forgotten its session, as one that was started anew has: only a new client mends that.

    Servers should say so with status 404; many say 400.
    """
    request = response.request
    if request.method != "POST" or "mcp-session-id" not in request.headers:
        return
    if response.status_code == 404 or (response.status_code == 400 and b"session" in (await response.aread()).lower()):
        raise ConnectionError(f"the server does not know the session any more (HTTP status {response.status_code})")
