"""Waiting for the store without a wake-up of the event loop for every write."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future

MAX_PENDING = 1024
"""Writes that may be waited for before no further call is begun. The store's own bound is far above: whoever meets that one waits
together with the whole event loop."""


class DurableWrites:
    """Turns the store's futures into awaitables of one event loop.

    A group commit completes many futures at once, from the writer's thread. `asyncio.wrap_future` would wake the loop once
    for each; here the first one wakes it, and the rest ride along.
    """

    def __init__(self) -> None:
        self._done: deque[tuple[asyncio.Future[None], Future[None]]] = deque()
        self._waking = False
        self.pending = 0
        """How many writes are being waited for."""
        self._some_ended = asyncio.Event()

    async def room(self) -> None:
        """Return once fewer than `MAX_PENDING` writes are being waited for: a slow disk holds back the calls that follow."""
        while self.pending >= MAX_PENDING:
            self._some_ended.clear()
            await self._some_ended.wait()

    async def wait(self, write: Future[None]) -> None:
        """Return once the write is durable, or raise what kept it from being so."""
        if write.done():
            return write.result()
        waiter = asyncio.get_running_loop().create_future()
        self.pending += 1
        write.add_done_callback(lambda done: self._on_done(waiter, done))
        try:
            await waiter
        finally:
            self.pending -= 1
            self._some_ended.set()

    def _on_done(self, waiter: asyncio.Future[None], write: Future[None]) -> None:
        """Runs in the writer's thread."""
        self._done.append((waiter, write))
        if not self._waking:
            self._waking = True
            try:
                waiter.get_loop().call_soon_threadsafe(self._settle)
            except RuntimeError:  # The loop has ended, and leaves nobody who waits.
                self._waking = False

    def _settle(self) -> None:
        # Before the queue is emptied: what is appended from here on asks for a wake-up of its own.
        self._waking = False
        while self._done:
            waiter, write = self._done.popleft()
            if waiter.done():  # Cancelled: the client left.
                continue
            error = write.exception()
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
