"""Keep the client of a silent stream waiting: a prompt may queue for longer than a client reads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType


class keep_alive:  # noqa: N801  (reads as a statement, like `asyncio.timeout`)
    """`with keep_alive(send, nothing, 15.0) as spoken:` sends `nothing` whenever `spoken()` was not called for that long.

    One timer for a stream, set again only when it fires: a stream that is never silent pays for two calls.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]], nothing: bytes, interval_s: float) -> None:
        self._send = send
        self._nothing = nothing
        self._interval_s = interval_s
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> Callable[[], None]:
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._interval_s, self._look)
        return self._spoken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _spoken(self) -> None:
        self._last = self._loop.time()

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._last >= self._interval_s and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(self._say_nothing())
            self._last = now
        self._timer = self._loop.call_at(self._last + self._interval_s, self._look)

    async def _say_nothing(self) -> None:
        await self._send(self._nothing)
