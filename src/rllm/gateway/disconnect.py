"""Stop working for a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from rllm.gateway.deadlines import Deadlines
from rllm.gateway.errors import STOPPED, GatewayError, was_stopped

WATCH_AFTER_S = 0.1
"""Most calls of a fast server are over by then, and never pay for a task that watches their connection."""


class ClientDisconnected(Exception):
    """The client closed its connection before it had the whole answer."""


class until_disconnect:  # noqa: N801  (reads as a statement, like `asyncio.timeout`)
    """`async with until_disconnect(receive, deadlines):` cancels its block, and raises `ClientDisconnected`, if the client leaves.

    A block that is cancelled because the gateway is stopped raises a `GatewayError`, 503.
    The request's body must have been read: from there on an ASGI server has only the disconnect left to say.
    """

    def __init__(
        self, receive: Receive, deadlines: Deadlines, goes_on: Callable[[Callable[[], None]], bool] | None = None
    ) -> None:
        """`goes_on(cut)` is asked when the client has left; if it returns true, the block goes on until `cut()`."""
        self._receive = receive
        self._deadlines = deadlines
        self._goes_on = goes_on
        self._active = True
        self._watcher: asyncio.Task[None] | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        self._worker = worker
        self._deadlines.set(self, WATCH_AFTER_S, asyncio.get_running_loop())

    def expire(self) -> None:
        """Begin to watch the connection."""
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._goes_on is None or not self._goes_on(self._cut):
            self._cut()

    def _cut(self) -> None:
        if self._active:
            self._gone = True
            self._worker.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False
        self._deadlines.drop(self)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # else they hold each other, and the call's session, until garbage is collected
        if self._gone:
            self._worker.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientDisconnected from error
        elif was_stopped(error):
            self._worker.uncancel()
            raise GatewayError(503, f"{STOPPED}: ask again", code="stopped", retry_after_s=1.0) from error
