"""One server of a pool: what it is doing, and whether calls may go to it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rllm.errors import InferenceError
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.http import HTTPUpstream

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
"""Between the first failed check of a server and the second, and after its first refusal; doubled by each that follows."""
_LONGEST_REST_S = 30.0
"""However long a server asks to be left alone: its reason may be over sooner, and calls are held for a minute only, unless a
pool is told otherwise; they would fail a moment before it is asked again."""
_CHECK_TIMEOUT_S = 5.0
_MAX_SLOW_CHECKS = 3
"""A busy server may be slow to answer a check: so many in a row, and no call answered meanwhile, mean that it hangs."""


class Replica:
    """Calls go to it unless it is paused, removed, full, down (until it answers a check) or resting (for a time)."""

    def __init__(
        self,
        id: int,
        upstream: HTTPUpstream,
        *,
        max_in_flight: int,
        check_interval_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when calls may go to it again, whoever found that out, and when it is down for good."""
        self.id = id
        self.upstream = upstream
        self.in_flight = 0
        self.num_calls = 0
        self.picked_at = 0
        """A number that grows with every pick of the pool: of two that are equally busy, the longer unused one is next."""
        self.paused = False
        self.removed = False
        self.weight_version: int | None = None
        self.problem: str | None = None
        """Why it is down or resting."""
        self.is_lost = False
        """Whether it is down for good, by whoever keeps it alive."""
        self._max_in_flight = max_in_flight
        self._check_interval_s = check_interval_s
        self._on_change = on_change
        self._usable_from = 0.0
        self._num_refusals = 0
        self._num_slow_checks = 0
        self._answered = False
        self._check_now: asyncio.Event | None = None

    @property
    def address(self) -> str:
        return self.upstream.base_url

    @property
    def up(self) -> bool:
        """Whether it answers, as far as is known."""
        return self._usable_from == 0.0 or self._usable_from <= time.monotonic()

    @property
    def takes_calls(self) -> bool:
        """Whether a call may go to it now."""
        return self.in_flight < self._max_in_flight and not self.paused and not self.removed and self.up

    def answered(self) -> None:
        """Note an answer, which says more than any check."""
        self._answered = True
        self._num_slow_checks = 0
        if self._num_refusals and self.up:
            self._recover()

    def refused(self, error: UpstreamError) -> float:
        """Note that it is there and cannot answer now; returns after how many seconds it is asked again."""
        if self.up:  # Of many calls that are refused together, the first one counts.
            pause_s = min(error.retry_after_s or self._pause_s(self._num_refusals), _LONGEST_REST_S)
            self._num_refusals += 1
            self._usable_from = time.monotonic() + pause_s
            self.problem = str(error)
            logger.warning("upstream %s: resting for %.1f s: %s", self.address, pause_s, error)
        return max(self._usable_from - time.monotonic(), 0.0)

    def failed(self, error: Exception) -> None:
        """Note that it cannot be reached; from now on it is down, until a check says otherwise."""
        self.problem = str(error)
        self.is_lost = isinstance(error, UpstreamError) and error.fault == "lost"
        if self._usable_from < math.inf:
            self._usable_from = math.inf
            logger.warning("upstream %s is down, and gets no calls until it answers: %s", self.address, error)
            self.suspect()
        if self.is_lost:
            self._on_change()

    def suspect(self) -> None:
        """Have it checked at once."""
        self._answered = False
        if self._check_now is not None:
            self._check_now.set()

    async def check(self) -> None:
        """Ask whether it answers, and note what it says. Its silence is not noted: anybody may ask, as often as they like.

        Raises:
            InferenceError: if it does not.
        """
        try:
            await self._ask()
        except TimeoutError as error:
            raise self._silence() from error

    async def _check_in_turn(self) -> None:
        """A check of the watch: so many silences in a row take the replica down."""
        try:
            with suppress(InferenceError):  # It is noted.
                await self._ask()
        except TimeoutError:
            self._num_slow_checks += 1
            if self._num_slow_checks >= _MAX_SLOW_CHECKS:
                self.failed(self._silence())

    async def _ask(self) -> None:
        """
        Raises:
            InferenceError: if it does not answer calls, which is noted.
            TimeoutError: if it says nothing in time.
        """
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self.upstream.check()
        except UpstreamError as error:
            if error.fault != "call":
                self.failed(error)
            elif error.status_code < 500:  # it is there, and does not tell us its models
                self._answered_check()
            raise
        self._answered_check()

    def _silence(self) -> UpstreamError:
        return UpstreamError(f"the upstream {self.address} did not answer within {_CHECK_TIMEOUT_S:g} s")

    def _answered_check(self) -> None:
        self._num_slow_checks = 0
        if self._usable_from == math.inf:
            self._recover()

    async def watch(self) -> None:
        """Check it for ever: now and then while it is up and silent, and ever more rarely while it is down."""
        self._check_now = asyncio.Event()
        if not self.up:
            self._check_now.set()
        num_failed = 0
        while True:
            await self._wait(self._check_interval_s if self.up else self._pause_s(num_failed))
            if self.up and self._answered:
                self._answered = False
                continue
            await self._check_in_turn()
            num_failed = 0 if self.up else num_failed + 1

    async def _wait(self, seconds: float) -> None:
        """For so long, or until a check is wanted at once."""
        assert self._check_now is not None
        try:
            async with asyncio.timeout(seconds):
                await self._check_now.wait()
        except TimeoutError:
            return
        self._check_now.clear()

    def _pause_s(self, num_failures: int) -> float:
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(num_failures, 20), self._check_interval_s)
        return pause_s * random.uniform(0.75, 1.0)

    def _recover(self) -> None:
        logger.warning("upstream %s answers again", self.address)  # as loud as what said that it is down
        self._usable_from, self._num_refusals, self.problem, self.is_lost = 0.0, 0, None, False
        self._on_change()

    def to_dict(self) -> dict[str, Any]:
        """What an operator is told."""
        state = "removed" if self.removed else "paused" if self.paused else "up" if self.up else "down"
        return {
            "id": self.id,
            "url": self.address,
            "state": state,
            "problem": None if self.up else self.problem,
            "in_flight": self.in_flight,
            "num_calls": self.num_calls,
            "weight_version": self.weight_version,
        }
