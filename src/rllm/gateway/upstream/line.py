"""Calls that wait for their turn: first come, first served, and no turn is ever lost."""

from __future__ import annotations

import asyncio
import time


class WaitingLine:
    """Places in the order in which they were taken. One that is called and cannot go on keeps its place."""

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[None]] = {}
        """By place, in order; done where the place has been called."""
        self._last_place = 0

    def __len__(self) -> int:
        return len(self._calls)

    def join(self) -> int:
        """Take the last place."""
        self._last_place += 1
        self._calls[self._last_place] = asyncio.get_running_loop().create_future()
        return self._last_place

    async def called(self, place: int, until: float) -> None:
        """Return when the place is called; each return needs a call of its own.

        Raises:
            TimeoutError: if it was not called until then, on `time.monotonic`'s clock.
        """
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._calls[place]
        finally:
            self._calls[place] = asyncio.get_running_loop().create_future()

    def leave(self, place: int) -> None:
        """Give up the place, and let the next one try: there may be room for more than who leaves."""
        del self._calls[place]
        self.call_next()

    def call_next(self) -> None:
        """Call the first place that is not called yet."""
        for call in self._calls.values():
            if not call.done():
                call.set_result(None)
                return

    def call_all(self) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_result(None)
