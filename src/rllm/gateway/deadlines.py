"""Many deadlines on one timer: nearly all of them are met, and a timer of the event loop for each costs more than that."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Expiring(Protocol):
    """What has a deadline; hashed by its identity."""

    def expire(self) -> None:
        """Called once the deadline has passed."""


class Deadlines:
    """The deadlines of what one event loop does. One may be noticed late, by up to `grain_s` seconds."""

    def __init__(self, grain_s: float) -> None:
        self._grain_s = grain_s
        self._due: dict[Expiring, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = 0.0

    def set(self, item: Expiring, after_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Have it called unless it is dropped in time. `loop` is the one that runs."""
        when = loop.time() + after_s
        self._due[item] = when
        if self._timer is None or when < self._looks_at or self._loop is not loop:
            self._look_at(when, loop)

    def drop(self, item: Expiring) -> None:
        self._due.pop(item, None)

    def _look_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._look, loop)
        self._looks_at, self._loop = when, loop

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        passed = [item for item, when in self._due.items() if when <= now]
        for item in passed:
            del self._due[item]
        if self._due:
            self._look_at(max(min(self._due.values()), now + self._grain_s), loop)
        for item in passed:
            item.expire()
