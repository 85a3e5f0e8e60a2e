"""Which rollouts are under way, and which of them take far longer than others did."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median

from rllm.engine.awake import awake

logger = logging.getLogger(__name__)

LEAST_S = 30.0
"""No rollout counts as stuck before it has taken this long."""
FACTOR = 5.0
"""A rollout is stuck once it has taken so many times the median of those that ended."""
_ENOUGH = 4
"""Rollouts that must have ended before others are compared with them."""
_LATEST = 256


class UnderWay:
    """Rollouts by name, and when they began; may be asked from any thread."""

    def __init__(self, clock: Callable[[], float] = awake) -> None:
        self._clock = clock
        self._began: dict[int, tuple[str, float]] = {}
        self._took: deque[float] = deque(maxlen=_LATEST)
        self._told: set[int] = set()
        self._count = 0

    @contextmanager
    def one(self, label: str) -> Iterator[None]:
        """A rollout of this name is under way while inside."""
        self._count += 1
        number, began = self._count, self._clock()
        self._began[number] = (label, began)
        try:
            yield
        finally:
            del self._began[number]
            self._told.discard(number)
            self._took.append(self._clock() - began)

    @property
    def num_running(self) -> int:
        return len(self._began)

    def stuck(self) -> dict[str, float]:
        """Those that take far longer than others did, and for how many seconds they have."""
        return {label: seconds for _, label, seconds in self._stuck()}

    def warn(self) -> None:
        """Log each that is stuck, once."""
        for number, label, seconds in self._stuck():
            if number not in self._told:
                self._told.add(number)
                logger.warning(
                    "rollout %s has been under way for %.0f s, and others took %.3g s: it may be stuck; it is cut off at "
                    "rollout.timeout_s",
                    label,
                    seconds,
                    median(self._took),
                )

    @asynccontextmanager
    async def watched(self, every_s: float = LEAST_S / 3) -> AsyncIterator[None]:
        """While inside, warn of those that get stuck."""
        watch = asyncio.create_task(self._watch(every_s), name="rllm stuck rollouts")
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.warn()

    def _stuck(self) -> list[tuple[int, str, float]]:
        if len(self._took) < _ENOUGH:
            return []
        now, limit = self._clock(), max(LEAST_S, FACTOR * median(self._took))
        ages = [(number, label, now - began) for number, (label, began) in list(self._began.items())]
        return [item for item in ages if item[2] > limit]
