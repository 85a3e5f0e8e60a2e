"""A bound on how many are at work at a time, kept by rank: the rollouts of an older step go before those of a later one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """At most `number` at a time. Those who wait are called by their rank, the lowest first, then by their arrival.

    Belongs to one event loop.
    """

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def one(self, rank: int) -> AsyncIterator[Turn]:
        """Wait for a turn, and have it inside."""
        turn = Turn(self, rank)
        await turn.wait()
        try:
            yield turn
        finally:
            turn.end()

    async def wait(self, rank: int) -> None:
        """Return when it is the caller's turn, which it must `pass_on`."""
        if self._num_free:
            self._num_free -= 1
            return
        called = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), called))
        try:
            await called
        except asyncio.CancelledError:
            if called.done() and not called.cancelled():  # called and cancelled in the same moment
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Call the next who still waits."""
        while self._waiting:
            called = heapq.heappop(self._waiting)[-1]
            if not called.done():
                called.set_result(None)
                return
        self._num_free += 1

    def has_before(self, rank: int) -> bool:
        """Whether somebody waits who goes before this rank."""
        return bool(self._waiting) and self._waiting[0][0] < rank


class Turn:
    """One's turn, which may be given to a lower rank between two pieces of work."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        self._rank = rank
        self._is_held = False

    async def wait(self) -> None:
        await self._turns.wait(self._rank)
        self._is_held = True

    async def give_way(self) -> None:
        """Let those of a lower rank go first."""
        if self._turns.has_before(self._rank):
            self.end()
            await self.wait()

    def end(self) -> None:
        if self._is_held:
            self._is_held = False
            self._turns.pass_on()
