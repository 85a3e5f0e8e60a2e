"""HTTP/1.1 to one server over kept-alive connections: just what forwarding a call needs.

It is used instead of a general HTTP client because with aiohttp in its place (no decompression, no cookies, no
connection limit), the gateway of `benchmarks/gateway.py` needs 17 % more CPU for whole answers and 31 % more for
streams. It is a protocol on the parser that the server uses too, without redirects, cookies, compression or proxies. A
read returns whatever has arrived, in however many HTTP chunks.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

_MAX_BUFFERED = 1024 * 1024
"""Bytes that may wait for a slow reader before the server is made to wait."""


_REST_S = 1.0
"""Seconds to wait for the end of the HTTP message after the last event."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Several times the size of the longest answers with an entry for every token; more would be a fault of the server."""

MAX_STREAM_BYTES = 4 * MAX_ANSWER_BYTES
"""Limit for all events of a stream, each of which repeats the answer's metadata."""


class HTTPConnections:
    """Sends requests to one server. Belongs to the event loop that first uses it, until it is closed."""

    def __init__(
        self, base_url: str, *, connect_timeout_s: float, read_timeout_s: float, total_timeout_s: float
    ) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path
        self._authority = parts.netloc.rpartition("@")[2]
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._total_timeout_s = total_timeout_s
        self._idle: list[Connection] = []

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", *, deadline: float | None = None
    ) -> Connection:
        """Send a request on an idle or a new connection, and return it with the head of the answer.

        Call `release` after reading the body; earlier, it closes the connection, so that the server stops. A kept
        connection that breaks off before any byte of the answer is replaced by a new one: the server may have
        closed it meanwhile.

        Args:
            method: `GET` or `POST`.
            path: follows the base URL.
            headers: further headers.
            body: whole body of the request.
            deadline: end of the exchange, on `time.monotonic`'s clock, in place of the total time.

        Raises (here, and on reading):
            TimeoutError: if the server is silent for too long, or not done in the total time.
            UnreachableError: if the server cannot be reached.
            OSError: if it breaks off, does not speak HTTP, or answers with more than the limit.
        """
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"host: {self._authority}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        deadline = time.monotonic() + self._total_timeout_s if deadline is None else deadline
        is_fresh = not self._idle
        connection = await self._connect() if is_fresh else self._idle.pop()
        try:
            try:
                await connection.send(request, self._read_timeout_s, deadline)
            except ConnectionError as error:
                if is_fresh or connection.answering:
                    raise
                connection.close()
                try:
                    connection = await self._connect()
                except UnreachableError:
                    raise error from None  # The server may have had the request before it died.
                await connection.send(request, self._read_timeout_s, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, if it can carry one."""
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close idle connections; those in use close when their exchange ends."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._idle), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise UnreachableError(f"no connection was made within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise UnreachableError(str(error)) from error
        return connection


class UnreachableError(ConnectionError):
    """No connection to the server, which never saw the request."""


class TooLongError(OSError):
    """An answer above the size limit."""


class Connection(asyncio.Protocol):
    """One connection, and the answer to the request that was last sent on it."""

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        # Called for every HTTP chunk, of which a streamed answer has one for each token.
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.answering = False
        """True once any byte of the answer has arrived."""
        self._has_head = self._complete = self._keeps_alive = False
        self._parts.clear()
        self._num_buffered = 0

    @property
    def reusable(self) -> bool:
        """True if the whole answer has arrived and the server keeps the connection open."""
        return self._complete and self._keeps_alive and self._failure is None

    async def send(self, request: bytes, read_timeout_s: float, deadline: float) -> None:
        """Send a request, and wait for the head of its answer."""
        self._reset()
        if self._failure is not None:
            raise self._failure
        self._read_timeout_s, self._deadline = read_timeout_s, deadline
        self._transport.write(request)
        while not self._has_head:
            await self._more()

    async def read_some(self) -> bytes:
        """Return the part of the body that has arrived since the last read, waiting for one; empty at its end."""
        while not self._parts and not self._complete:
            await self._more()
        return self._take()

    async def read(self, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """Return the rest of the body; raise `OSError` if it is longer than the limit."""
        pieces = []
        size = 0
        while self._parts or not self._complete:
            if not self._parts:
                await self._more()
                continue
            pieces.append(self._take())
            size += len(pieces[-1])
            if size > limit:
                raise TooLongError(f"its answer is longer than {limit:,} bytes")
        return b"".join(pieces)

    async def pass_over_rest(self) -> None:
        """Read to the end of the HTTP message, if it comes soon, so that the connection can be reused."""
        self._deadline = min(self._deadline, time.monotonic() + _REST_S)
        with suppress(OSError):  # too late, or broken off: only the connection is lost
            while await self.read_some():
                pass

    def close(self) -> None:
        """Abort the connection."""
        self._failure = self._failure or ConnectionAbortedError("the connection was closed")
        self._transport.abort()

    async def _more(self) -> None:
        """Wait until something arrives."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        allowed_s = min(self._read_timeout_s, self._deadline - time.monotonic())
        timer = self._loop.call_later(allowed_s, self._expire)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _expire(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError("the server was silent for too long"))

    def _take(self) -> bytes:
        taken = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._num_buffered > _MAX_BUFFERED:
            self._transport.resume_reading()
        self._num_buffered = 0
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods and another parent.

    def data_received(self, data: bytes) -> None:
        self.answering = True
        self._num_buffered += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._failure = ConnectionError(f"the server does not speak HTTP: {error}; its answer begins {data[:60]!r}")
            self._transport.abort()
        except httptools.HttpParserUpgrade:
            self._failure = ConnectionError("the server switches to another protocol without being asked")
            self._transport.abort()
        if self._num_buffered > _MAX_BUFFERED:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        framed = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._has_head and not framed:
            self._complete = True  # The end of the connection is the end of the body.
        self._failure = self._failure or error or ConnectionResetError("the server closed the connection")
        self._wake()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200
        self._keeps_alive = bool(self._parser.should_keep_alive())

    def on_message_complete(self) -> None:
        if self._has_head:
            self._complete = True
        else:  # An interim answer, such as 100 Continue.
            self.headers.clear()
