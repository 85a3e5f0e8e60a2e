"""Routes, by which a sandbox without a network reaches one server; on another machine, by a public address.

On this machine a small program enters the sandbox's network namespace, listens there and hands the socket to this
process, which forwards each request to the one server. It needs no program in the sandbox, so it works for all.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import suppress
from urllib.parse import unquote, urlsplit

import orjson

from rllm._runtime.process import no_fork_meanwhile
from rllm.errors import ConfigError
from rllm.sandbox import namespaces
from rllm.sandbox.base import SandboxError

MAX_CONNECTIONS = 64
"""Requests of one route at a time; others wait."""
MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0
_PIECE = 64 << 10

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
_OF_THE_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"http2-settings", b"te", b"host"}


class Route:
    """Forwards requests from a port of a sandbox's loopback to one server, as long as it is open.

    If the URL has a path, only requests to it and below it pass: the URL of a session gives access to no other session,
    and to nothing else of the gateway. Each request has a connection of its own, so none can hide another one in its
    body.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"route {url!r}: use a URL of the form http://HOST:PORT/PATH")
        self._host, self._port, self._netloc = parts.hostname, parts.port or 80, parts.netloc.encode()
        self._path = parts.path
        self._prefix = unquote(parts.path).rstrip("/")
        self._limit = asyncio.Semaphore(MAX_CONNECTIONS)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        """URL in the sandbox."""

    @classmethod
    async def open(cls, pid: int, url: str) -> Route:
        """Open a route to a URL in the network namespace of a process.

        Raises:
            ConfigError: if the URL is not of the form `http://HOST:PORT/PATH`.
            SandboxError: if the process has ended, or its namespace may not be entered.
        """
        route = cls(url)
        listener = await _listener(pid)
        route.url = f"http://127.0.0.1:{listener.getsockname()[1]}{route._path}"
        route._server = await asyncio.start_server(route._accept, sock=listener, limit=MAX_HEAD_BYTES)
        return route

    async def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # An error of a connection, on either side, ends only this request.
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
                async with self._limit:
                    await self._forward(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_TIMEOUT_S)
            head = self._checked(head)
        except asyncio.LimitOverrunError:
            return await _refuse(writer, b"431 Request Header Fields Too Large", b"the headers are too long")
        except ValueError as error:
            return await _refuse(writer, b"400 Bad Request", str(error).encode())
        except PermissionError as error:
            return await _refuse(writer, b"403 Forbidden", str(error).encode())
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            return await _refuse(writer, b"502 Bad Gateway", f"the server cannot be reached: {error}".encode())
        body = asyncio.create_task(_copy(reader, server_writer))
        try:
            server_writer.write(head)
            await _copy(server_reader, writer)
        finally:
            body.cancel()
            server_writer.close()
            await asyncio.gather(body, return_exceptions=True)

    def _checked(self, head: bytes) -> bytes:
        """Return the head with the server's name, and with the request to close the connection afterwards.

        Raises:
            ValueError: if it is malformed.
            PermissionError: if the path is not of this route.
        """
        first, *lines = head[:-4].split(b"\r\n")
        request = _REQUEST_LINE.fullmatch(first)
        headers = [_HEADER.fullmatch(line) for line in lines]
        if request is None or not all(headers):
            raise ValueError("malformed request")
        target = request[2].decode()
        path = unquote(target.partition("?")[0])
        is_below = path == self._prefix or path.startswith(self._prefix + "/")
        if not is_below or "\\" in path or "#" in target or ".." in path.split("/") or "." in path.split("/"):
            raise PermissionError(f"this sandbox reaches {self._prefix or '/'} only")
        kept = [found[0] for found in headers if found and found[1].lower() not in _OF_THE_CONNECTION]
        return b"\r\n".join([first, b"Host: " + self._netloc, b"Connection: close", *kept, b"", b""])


async def _refuse(writer: asyncio.StreamWriter, status: bytes, reason: bytes) -> None:
    body = b'{"error": {"message": %s, "type": "sandbox_route"}}' % orjson.dumps(reason.decode())
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    writer.write(head % (status, len(body)) + body)
    await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()


async def _listener(pid: int) -> socket.socket:
    here, there = socket.socketpair()
    with here, there:
        job = namespaces.arguments({"do": "listen", "pid": pid, "pass_fds": [there.fileno()]})
        with no_fork_meanwhile():
            process = await asyncio.create_subprocess_exec(
                *job, pass_fds=[there.fileno()], env={}, stderr=asyncio.subprocess.PIPE
            )
        _, reason = await process.communicate()
        here.setblocking(False)
        try:
            _, (number,), _, _ = socket.recv_fds(here, 16, 1)
        except (BlockingIOError, ValueError) as error:
            raise SandboxError(f"no route to the sandbox: {reason.decode(errors='replace').strip()}") from error
    listener = socket.socket(fileno=number)
    listener.setblocking(False)
    return listener


VARIABLE = "RLLM_PUBLIC_GATEWAY_URL"
"""`http://ADDRESS:PORT` at which other machines reach the gateway.

A sandbox has the key of its session, which gives access to nothing else of the gateway.
"""


def public_route(url: str, sandbox: str) -> str:
    """Return the public form of a URL of the gateway; raise `ConfigError` if there is none."""
    if gateway_address() is None:
        raise ConfigError(
            f"sandbox={sandbox} does not reach {url} from other machines: set gateway.host and gateway.port, or make a "
            f"tunnel, and set the variable {VARIABLE} to the gateway's http://ADDRESS:PORT"
        )
    return os.environ[VARIABLE].rstrip("/") + urlsplit(url).path


def gateway_address() -> tuple[str, int] | None:
    """Return the IPv4 address and port of the public gateway, if there is one; raise `ConfigError` if it is unknown."""
    public = os.environ.get(VARIABLE)
    if not public:
        return None
    try:
        parts = urlsplit(public)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        return socket.gethostbyname(parts.hostname or ""), port
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{VARIABLE}={public!r}: use a URL of the form http://ADDRESS:PORT ({error})") from error
