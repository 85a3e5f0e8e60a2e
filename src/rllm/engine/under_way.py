"""Running rollouts, and those among them that take far longer than others did."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median

logger = logging.getLogger(__name__)

LEAST_S = 30.0
"""Seconds before a rollout can count as stuck."""
FACTOR = 5.0
"""A rollout is stuck when it has taken this multiple of the median of finished ones."""
_ENOUGH = 4
"""Number of finished rollouts needed for the comparison."""
_LATEST = 256


class UnderWay:
    """Running rollouts and their start times; may be read from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[int, tuple[str, float]] = {}
        self._took: deque[float] = deque(maxlen=_LATEST)
        self._warned: set[int] = set()
        self._count = 0

    @contextmanager
    def one(self, label: str) -> Iterator[None]:
        """Count a rollout of this name as running while inside."""
        self._count += 1
        number, began = self._count, self._clock()
        self._began[number] = (label, began)
        try:
            yield
        finally:
            del self._began[number]
            self._warned.discard(number)
            self._took.append(self._clock() - began)

    @property
    def num_running(self) -> int:
        return len(self._began)

    def stuck(self) -> dict[str, float]:
        """Return the rollouts that take far longer than others did, with their durations in seconds."""
        return {label: seconds for _, label, seconds in self._stuck()}

    def warn(self) -> None:
        """Log each stuck rollout once."""
        for number, label, seconds in self._stuck():
            if number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "rollout %s has been running for %.0f s, and others took %.3g s: it may be stuck; it is "
                    "cancelled at rollout.timeout_s",
                    label,
                    seconds,
                    median(self._took),
                )

    @asynccontextmanager
    async def watched(self, every_s: float = LEAST_S / 3) -> AsyncIterator[None]:
        """Log stuck rollouts while inside."""
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
