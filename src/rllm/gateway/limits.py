"""How much one client may ask of a gateway: calls a minute, altogether and in each session, and how many sessions."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict

from rllm.gateway.config import GatewayConfig
from rllm.gateway.errors import GatewayError
from rllm.gateway.sessions import Sessions
from rllm.store.base import TraceStore

_MAX_BUCKETS = 10_000
_COUNT_EVERY_S = 1.0
_SESSION_RETRY_S = 60.0


class TokenBucket:
    """Lets `per_minute` calls through in a minute, which may come all at once."""

    __slots__ = ("_at", "_left", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._left = max(per_minute, 1.0)
        self._at = now

    def wait_s(self, now: float) -> float:
        """How long it is until a call may go, 0 for at once."""
        self._left = min(self._left + (now - self._at) * self._per_minute / 60, max(self._per_minute, 1.0))
        self._at = now
        return max(0.0, (1.0 - self._left) * 60 / self._per_minute)

    def take(self) -> None:
        """Count a call that went."""
        self._left -= 1.0


class CallLimits:
    """The limits of one gateway; touched only from its event loop."""

    def __init__(self, config: GatewayConfig, sessions: Sessions, store: TraceStore) -> None:
        self._config = config
        self._sessions = sessions
        self._store = store
        self._all = TokenBucket(config.calls_per_minute or 1.0, time.monotonic())
        self._by_session: OrderedDict[str | None, TokenBucket] = OrderedDict()
        self._num_sessions = math.inf
        """As far as is known; before they are counted, too many."""
        self._counted_at = -math.inf
        self._counting = asyncio.Lock()

    @classmethod
    def of(cls, config: GatewayConfig, sessions: Sessions, store: TraceStore) -> CallLimits | None:
        """`None`, where nothing is limited."""
        limits = (config.calls_per_minute, config.session_calls_per_minute, config.max_sessions)
        return None if limits == (None, None, None) else cls(config, sessions, store)

    async def admit_call(self, session_id: str | None) -> None:
        """Count a call of this session, also one whose session may not begin; those that name none count as one session's together.

        Raises:
            GatewayError: 429, if it is one too many.
        """
        now = time.monotonic()
        if self._config.session_calls_per_minute is not None:
            own = self._bucket(session_id, self._config.session_calls_per_minute, now)
            _check(own.wait_s(now), "session_calls_per_minute", self._config.session_calls_per_minute)
        if self._config.calls_per_minute is not None:
            _check(self._all.wait_s(now), "calls_per_minute", self._config.calls_per_minute)
        self._all.take()  # Before anything is awaited: calls that come at once are counted each.
        if self._config.session_calls_per_minute is not None:
            own.take()
        await self.admit_session(session_id)

    async def admit_session(self, session_id: str | None) -> None:
        """Count a session that begins.

        Raises:
            GatewayError: 429, if it is one too many.
        """
        most = self._config.max_sessions
        if most is None or (session_id is not None and await self._sessions.has_begun(session_id)):
            return
        async with self._counting:
            if session_id is not None and self._sessions.knows(session_id):
                return  # Another call of its own has just begun it.
            if self._num_sessions >= most:
                await self._count(most)
            if self._num_sessions >= most:
                raise GatewayError(
                    429,
                    f"the gateway keeps max_sessions={most} sessions already: delete some, or raise the limit",
                    type="rate_limit_error",
                    code="too_many_sessions",
                    retry_after_s=_SESSION_RETRY_S,
                )
            self._num_sessions += 1

    def _bucket(self, session_id: str | None, per_minute: float, now: float) -> TokenBucket:
        bucket = self._by_session.get(session_id)
        if bucket is None:
            bucket = self._by_session[session_id] = TokenBucket(per_minute, now)
            if len(self._by_session) > _MAX_BUCKETS:
                self._by_session.popitem(last=False)
        self._by_session.move_to_end(session_id)
        return bucket

    async def _count(self, most: int) -> None:
        """Look how many sessions there are, but not all the time."""
        if time.monotonic() - self._counted_at < _COUNT_EVERY_S:
            return
        self._counted_at = time.monotonic()
        self._num_sessions = len(await asyncio.to_thread(self._store.sessions, limit=most))


def _check(wait_s: float, name: str, per_minute: float) -> None:
    if wait_s > 0:
        raise GatewayError(
            429,
            f"more calls than {name}={per_minute:g}: the next one may come in {wait_s:.1f} s",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )
