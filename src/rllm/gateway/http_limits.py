"""HTTP limits of the gateway: sizes and deadlines of requests, clients that leave, and keep-alives of silent streams.

`BoundedHTTP` is uvicorn's protocol with bounds on the heads of requests, and on the time that a client may leave its
answer unread. `read_body` bounds bodies, `BodyBudget` all of them together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rllm._runtime.process import total_memory
from rllm._runtime.untrusted import LARGE
from rllm.gateway.config import GatewayConfig
from rllm.gateway.dialects import dialect_of
from rllm.gateway.errors import STOPPED, GatewayError, was_stopped

_BUDGET_KEY = "rllm.body_budget"
_CONNECTION_KEY = "rllm.connection"
"""Key of an ASGI scope for the connection of its request."""
_MAX_LENGTH_DIGITS = 15
_H2C_OFFER = re.compile(rb"(?i)\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)")


class ClientDisconnected(Exception):
    """The client closed its connection before it had the whole answer."""


class BoundedHTTP(HttpToolsProtocol):
    """One connection of the server, closed when its client exceeds the limits."""

    def __init__(self, *args: Any, limits: GatewayConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._is_new = True
        self._in_head = False
        self._num_read = 0
        """Bytes read since the last request ended, not counting the body of the current one."""
        self._deadline: asyncio.TimerHandle | None = None
        """Timer that runs while the head of a request is awaited."""
        self._unread: asyncio.TimerHandle | None = None
        """Timer that runs while the client leaves its answer unread."""
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        """Called when the client leaves."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._limits.header_timeout_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Otherwise the call would wait for its client forever, and occupy a slot at the upstream.
        self._unread = self.loop.call_later(self._limits.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_new:
            # Java's HttpClient offers HTTP/2 with its first request. A server may ignore the offer (RFC 9110, 7.8), but
            # the parser would drop the request's body.
            self._is_new = False
            if b"h2c" in data:
                head, end, body = data.partition(b"\r\n\r\n")
                data = _H2C_OFFER.sub(b"", head + end[:2]) + end[2:] + body
        self._num_read += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_head:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            # Chunked bodies have headers and trailers of their own, which nothing else counts.
            if self._num_read > self._limits.max_body_bytes + self._limits.max_header_bytes:
                self.transport.abort()
        elif self._num_read > self._limits.max_header_bytes:
            self._refuse(self._head_too_large())
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.header_timeout_s, self._expire)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        self.scope[_CONNECTION_KEY] = self  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        self._num_read -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_read = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_head = False
        limits = self._limits
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if len(self.headers) > limits.max_headers or num_bytes > limits.max_header_bytes:
            self.app = self._answering(self._head_too_large())
        elif codings not in ([], [b"chunked"]):
            # The parser removes the chunks and nothing else; a proxy may read another end of the body than it does.
            given = b", ".join(codings)[:80].decode("latin-1")
            message = f"transfer-encoding={given!r}: use 'chunked' alone, or a content-length"
            self.app = self._answering(GatewayError(501, message, code="unsupported_transfer_encoding"))
        super().on_headers_complete()

    def _expire(self) -> None:
        self._deadline = None
        if self._in_head:
            self._refuse(
                GatewayError(408, f"the request's headers did not arrive within {self._limits.header_timeout_s:g} s")
            )
        else:  # A client that sent nothing.
            self.transport.abort()

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request whose head is incomplete, and close its connection."""
        body = self._rendered(error)
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _answering(self, error: GatewayError) -> ASGIApp:
        """Return an application that answers everything with an error and closes the connection."""
        return Response(self._rendered(error), error.status, {"connection": "close"}, "application/json")

    def _rendered(self, error: GatewayError) -> bytes:
        """Return an error in the wire format of the URL, as far as it has come."""
        return dialect_of(self.url.partition(b"?")[0].decode("latin-1"), ()).render_error(error)

    def _head_too_large(self) -> GatewayError:
        limits = self._limits
        return GatewayError(
            431,
            f"the request has more than {limits.max_headers} headers, or more than {limits.max_header_bytes:,} "
            "bytes of them: send metadata with POST /sessions",
            code="headers_too_large",
        )


class BodyBudget:
    """Limit on the total bytes of requests in progress; bodies below a megabyte are not counted.

    The body of a request that waits stays unread, so its client cannot send more. Belongs to one event loop.
    """

    def __init__(self, limits: GatewayConfig, *, most: int | None = None) -> None:
        """Set the limit to `most` bytes; by default an eighth of the memory, or eight of the longest bodies if more."""
        self._longest = limits.max_body_bytes
        self._available = self._most = most or max(8 * self._longest, total_memory() // 8)
        self._timeout_s = limits.body_timeout_s / 2
        self._released = asyncio.Event()
        """Set, and replaced, when bytes are released."""

    async def acquire(self, scope: Scope) -> None:
        """Reserve the bytes of a request's whole body until `release`.

        Raises:
            GatewayError: 503, if they are not available in time.
        """
        declared = dict(scope["headers"]).get(b"content-length", b"")
        size = int(declared) if declared.isdigit() and len(declared) < _MAX_LENGTH_DIGITS else self._longest
        size = min(size, self._longest, self._most)
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._available < size:
                    await self._released.wait()
        except TimeoutError:
            raise GatewayError(
                503,
                "the requests in progress are too large together: send this one again later",
                code="overloaded",
                retry_after_s=self._timeout_s,
            ) from None
        self._available -= size
        scope[_BUDGET_KEY] = size

    def release(self, scope: Scope) -> None:
        """Release the bytes of a request, if it has reserved any."""
        size = scope.pop(_BUDGET_KEY, 0)
        if size:
            self._available += size
            self._released.set()
            self._released = asyncio.Event()


async def read_body(scope: Scope, receive: Receive, limits: GatewayConfig, budget: BodyBudget) -> bytes:
    """Return the whole body of a request; a large one reserves bytes of the budget until its request ends.

    Raises:
        GatewayError: 413, if it is longer than the limit; 408, if it does not arrive in time; 415, if it is compressed;
            503, if the budget is spent.
        ClientDisconnected: if it never arrives.
    """
    for name, coding in scope["headers"]:
        if name == b"content-encoding" and coding.lower() != b"identity":
            raise GatewayError(
                415,
                f"content-encoding={coding.decode('latin-1')!r}: send the request body as it is, not compressed",
                code="unsupported_content_encoding",
            )
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.max_body_bytes:
                    raise GatewayError(
                        413,
                        f"the request body is longer than {limits.max_body_bytes:,} bytes: shorten the conversation, "
                        "or raise the limit (--max-body-bytes)",
                    )
                if size > LARGE and _BUDGET_KEY not in scope:
                    await budget.acquire(scope)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise GatewayError(
            408, f"the request body did not arrive within {limits.body_timeout_s:g} s", code="request_timeout"
        ) from None


class until_disconnect:  # noqa: N801  (reads as a statement, like `asyncio.timeout`)
    """`async with until_disconnect(scope):` cancels its block when the client leaves and raises `ClientDisconnected`.

    A block that is cancelled because the gateway stops raises a `GatewayError`, 503. The request's body must have been
    read. `BoundedHTTP` reports the departure; under another server, the block runs to its end.
    """

    def __init__(self, scope: Scope, outlives: Callable[[Callable[[], None]], bool] | None = None) -> None:
        """`outlives(cut)` is called when the client has left; if it returns true, the block continues until `cut()`."""
        self._connection: BoundedHTTP | None = scope.get(_CONNECTION_KEY)
        self._outlives = outlives
        self._active = True
        self._gone = False

    async def __aenter__(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        self._worker = worker
        if self._connection is not None:
            self._connection.on_lost = self._leave
            if self._connection.is_lost:
                asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        if self._active and (self._outlives is None or not self._outlives(self._cut)):
            self._cut()

    def _cut(self) -> None:
        if self._active:
            self._gone = True
            self._worker.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False
        if self._connection is not None:
            self._connection.on_lost = None
        if self._gone:
            self._worker.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientDisconnected from error
        elif was_stopped(error):
            self._worker.uncancel()
            raise GatewayError(503, f"{STOPPED}: ask again", code="stopped", retry_after_s=1.0) from error


@contextmanager
def keep_alive(
    send: Callable[[bytes], Awaitable[None]], comment: bytes, interval_s: float
) -> Iterator[Callable[[], None]]:
    """Send `comment` whenever the yielded function has not been called for `interval_s` seconds.

    A prompt may queue for longer than a client waits for a silent stream.
    """
    loop = asyncio.get_running_loop()
    last = loop.time()

    def sent() -> None:
        nonlocal last
        last = loop.time()

    async def watch() -> None:
        while True:
            await asyncio.sleep(last + interval_s - loop.time())
            if loop.time() - last >= interval_s:
                sent()
                await send(comment)

    watching = loop.create_task(watch())
    try:
        yield sent
    finally:
        watching.cancel()
