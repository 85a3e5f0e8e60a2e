"""A clock that stands still while this process does: what Ctrl-Z suspends has no time for its rollouts, and loses none by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GAP_S = 5.0
"""So long without a look at the clock is no accident, as whoever looks does so far more often; unless the processor was at work for
this process all the while, as it is for a program that keeps the interpreter's lock."""
_BUSY = 0.1


class AwakeClock:
    """Seconds, from any thread. It stands still for what is missing between two looks, while somebody has promised to look often."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self._clocks = clock, cpu_clock
        self._lock = threading.Lock()
        self._num_watching = 0
        self._lost_s = 0.0
        self._looked_at = clock(), cpu_clock()

    def __call__(self) -> float:
        with self._lock:
            return self._look() - self._lost_s

    def lost_s(self) -> float:
        """How long it has stood still in all: to be taken off another clock, such as the event loop's."""
        with self._lock:
            self._look()
            return self._lost_s

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, whoever entered calls the clock several times within `GAP_S`."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._look()
            self._num_watching += change

    def _look(self) -> float:
        (now, cpu), (before, cpu_before) = [clock() for clock in self._clocks], self._looked_at
        if self._num_watching and now - before > GAP_S and cpu - cpu_before < _BUSY * (now - before):
            self._lost_s += now - before
        self._looked_at = now, cpu
        return now


awake = AwakeClock()
"""This process's."""
