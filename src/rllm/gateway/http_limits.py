"""What a client may send before it has said what it wants: heads of bounded size, and requests that arrive in bounded time; and how
long it may leave an answer unread.

The server below knows none of these bounds. Nothing is measured of a request that arrives in one read, as nearly all do.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rllm._runtime.main_memory import total_memory
from rllm._runtime.untrusted import LARGE
from rllm.gateway.config import GatewayConfig
from rllm.gateway.corked import CorkedHTTP
from rllm.gateway.dialects import dialect_of
from rllm.gateway.disconnect import ClientDisconnected
from rllm.gateway.errors import GatewayError

LATE = "rllm.late"
"""What the scope of a request says whose body was cut off because it came too slowly."""
_LATE_S = 5.0
"""How much longer its connection is kept, so that the client can be told."""

_HELD = "rllm.held"
"""What the scope of a request has with a large body: the bytes of its room."""
_LONGEST_NUMBER = 15


class BoundedHTTP(CorkedHTTP):
    """One connection of the server, which ends when its client exceeds the limits."""

    def __init__(self, *args: Any, limits: GatewayConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._most_beside = limits.max_header_bytes + limits.max_body_bytes
        """Bytes of a request beside its body: one in chunks has headers of its own, and what follows it, which nobody else counts."""
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        """The request of which the end of the head, or of the body, is being waited for."""
        self._num_read = 0
        """Bytes read since the last whole request, but for those of bodies."""
        self._unread: asyncio.TimerHandle | None = None
        """Runs while more of an answer is waiting for the client than can be sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Its call would wait for it as long as it likes, and keep a place at the upstream.
        self._unread = self.loop.call_later(self._limits.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        self._num_read += len(data)
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.scope is not self.scope:
            self._wait_for_rest(is_first=cycle is before)
        else:
            self._num_read = 0
            if self._deadline is not None:
                self._set_deadline(None)

    def on_headers_complete(self) -> None:
        limits = self._limits
        if len(self.headers) > limits.max_headers or (
            self._num_read > limits.max_header_bytes
            and sum(len(name) + len(value) for name, value in self.headers) > limits.max_header_bytes
        ):
            error = self._head_too_large()
            self.app = _answering(error.status, self._rendered(error))
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            error = _unknown_coding(b", ".join(codings))
            self.app = _answering(error.status, self._rendered(error))
        if self._awaited is not None:
            self._awaited = None  # From here on it is the body that is waited for.
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_read -= len(body)
        super().on_body(body)

    def _is_in_head(self) -> bool:
        return self.scope is not None and (self.cycle is None or self.cycle.scope is not self.scope)

    def _wait_for_rest(self, *, is_first: bool) -> None:
        """Look after a request that is not whole yet; `is_first`: no other one ended in what was read last."""
        if self.transport.is_closing() or self.scope is None:
            return
        is_in_head = self._is_in_head()
        if is_in_head and not is_first:
            self._num_read = 0
        if is_in_head and self._num_read > self._limits.max_header_bytes:
            self._refuse(self._head_too_large())
        elif self._num_read > self._most_beside:
            self.transport.abort()
        elif self._awaited is not self.scope:
            self._awaited = self.scope
            self._set_deadline(self._limits.header_timeout_s if is_in_head else self._limits.body_timeout_s)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _set_deadline(self, after_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if after_s is None else self.loop.call_later(after_s, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        if self._is_in_head():
            self._refuse(GatewayError(408, f"no whole head came within {self._limits.header_timeout_s:g} s"))
        elif self.cycle is not None and self.cycle.more_body and LATE not in self.scope:
            self.scope[LATE] = True  # type: ignore[literal-required]
            self.cycle.more_body = self.cycle.keep_alive = False
            self.cycle.message_event.set()
            self._set_deadline(_LATE_S)
        else:  # A client that never said anything, or that does not listen.
            self.transport.abort()

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request whose head nobody has read to its end."""
        body = self._rendered(error)
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _rendered(self, error: GatewayError) -> bytes:
        """Return an error in the wire format of the URL, as far as it has come."""
        return dialect_of(self.url.partition(b"?")[0].decode("latin-1"), ()).render_error(error)

    def _head_too_large(self) -> GatewayError:
        limits = self._limits
        return GatewayError(
            431,
            f"the request has more than {limits.max_headers} headers, or more than {limits.max_header_bytes:,} bytes of "
            "them: send metadata with POST /sessions",
            code="headers_too_large",
        )


def _unknown_coding(codings: bytes) -> GatewayError:
    # The parser removes the chunks and nothing else; a proxy may read another end of the body than it does.
    return GatewayError(
        501,
        f"transfer-encoding={codings[:80].decode('latin-1')!r}: use 'chunked' alone, or a content-length",
        code="unsupported_transfer_encoding",
    )


def _answering(status: int, body: bytes) -> ASGIApp:
    """Answers anything with an error, and ends the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


class BodyRoom:
    """Bounds the bytes of all requests under way together; bodies below a megabyte are not counted.

    The body of a request without room stays unread, so its client cannot send on. Belongs to one event loop.
    """

    def __init__(self, limits: GatewayConfig, *, most: int | None = None) -> None:
        """`most` is the bound in bytes, by default an eighth of the memory, or eight of the longest bodies."""
        self._longest = limits.max_body_bytes
        self._left = self._most = most or max(8 * self._longest, total_memory() // 8)
        self._patience_s = limits.body_timeout_s / 2
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self, scope: Scope) -> None:
        """Wait for room for the whole body of a request, which keeps it until `give`.

        Raises:
            GatewayError: 503, if there is none in time.
        """
        declared = dict(scope["headers"]).get(b"content-length", b"")
        size = int(declared) if declared.isdigit() and len(declared) < _LONGEST_NUMBER else self._longest
        size = min(size, self._longest, self._most)
        try:
            async with asyncio.timeout(self._patience_s):
                while self._left < size:
                    self._waiting.append(asyncio.get_running_loop().create_future())
                    await self._waiting[-1]
        except TimeoutError:
            raise GatewayError(
                503,
                "the requests under way are too large together: send this one again later",
                code="overloaded",
                retry_after_s=self._patience_s,
            ) from None
        self._left -= size
        scope[_HELD] = size

    def give(self, scope: Scope) -> None:
        """Make the room of a request free, if it has any."""
        size = scope.pop(_HELD, 0)
        if size:
            self._left += size
            for waiter in self._waiting:
                with suppress(asyncio.InvalidStateError):
                    waiter.set_result(None)
            self._waiting.clear()


async def read_body(scope: Scope, receive: Receive, limits: GatewayConfig, room: BodyRoom) -> bytes:
    """Return the whole body of a request; a large one takes room until its request is done.

    Raises:
        GatewayError: 413, if it is longer than the limit; 408, if it does not arrive in time; 415, if it is compressed;
            503, if there is no room for it.
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
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if LATE in scope:
            raise GatewayError(
                408, f"the request body did not arrive within {limits.body_timeout_s:g} s", code="request_timeout"
            )
        part = message.get("body", b"")
        size += len(part)
        if size > limits.max_body_bytes:
            raise GatewayError(
                413,
                f"the request body is longer than {limits.max_body_bytes:,} bytes: shorten the conversation, or raise "
                "max_body_bytes",
            )
        if size > LARGE and _HELD not in scope:
            await room.take(scope)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def bounded(scope: Scope, receive: Receive, limits: GatewayConfig, room: BodyRoom) -> Receive:
    """A `receive` that gives a request's body in one piece, if it keeps the limits; see `read_body`."""
    is_read = False

    async def receive_whole() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": await read_body(scope, receive, limits, room), "more_body": False}

    return receive_whole
