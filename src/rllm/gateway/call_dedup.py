"""Deduplication of calls that clients repeat after a timeout: sampled once, traced once.

A client that times out closes its connection and sends the same request again. So a call whose client leaves after
about its read timeout continues for as long as the client may take to come back, and the repeated request gets its
answer. A client that leaves earlier is gone for good. Only a request that is marked as a retry is taken for one,
because agents sample the same prompt several times on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rllm.gateway.identity import METADATA_HEADER
from rllm.gateway.sessions import Session

_RETRY_COUNT = b"x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: 0 first, then 1, 2, ... for the same call."""
_READ_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
_IDEMPOTENCY_KEY = b"idempotency-key"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Pause of these SDKs before their first retry, doubled before each further one, and its maximum."""
_MARGIN_S = 2.0
_KEPT_S = 10.0
"""Seconds for which an answer is kept for an idempotency key."""
_MAX_KEPT_BYTES = 1024 * 1024
"""Maximum size of an answer that is kept for a client that may come back."""

_Key = tuple[Session | None, bytes, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryKey:
    """One request for an answer that may be requested several times."""

    key: _Key
    """Session (not its name, which may be reused), idempotency key, and hash of body and metadata header."""
    number: int = 0
    """Number of earlier requests of the client for this answer."""
    read_timeout_s: float | None = None
    """Read timeout of the client."""
    began: float = field(default_factory=time.monotonic)

    @property
    def idempotent(self) -> bool:
        """True if it has an idempotency key, under which any number of requests have one answer."""
        return bool(self.key[1])

    @property
    def will_retry(self) -> bool:
        """True if a client that leaves now has timed out, rather than lost interest."""
        if self.read_timeout_s is None:
            return self.idempotent
        # The client's clock began before ours, and no clock is exact on a busy machine.
        return time.monotonic() - self.began >= 0.5 * self.read_timeout_s

    @property
    def pause_s(self) -> float:
        """Seconds that the client may take to come back."""
        return min(_FIRST_PAUSE_S * 2.0 ** min(self.number, 8), _LONGEST_PAUSE_S) + _MARGIN_S


def retry_key(headers: Mapping[bytes, bytes], session: Session | None, body: bytes) -> RetryKey | None:
    """Return the retry key of a request, or `None` if its retry would look like another call.

    Args:
        headers: of the request.
        session: the one that the request names: without one, equal requests may be of different agents.
        body: of the request; a retry has the same.
    """
    idempotency_key = headers.get(_IDEMPOTENCY_KEY, b"")
    count = headers.get(_RETRY_COUNT, b"")
    if not idempotency_key and (session is None or not count.isdigit()):
        return None
    timeout = next((headers[name] for name in _READ_TIMEOUTS if name in headers), b"")
    try:
        read_timeout_s = float(timeout)
    except ValueError:
        read_timeout_s = None
    return RetryKey(
        key=(session, idempotency_key, hash((body, headers.get(METADATA_HEADER.encode())))),
        number=int(count[:4]) if count.isdigit() else 0,
        read_timeout_s=read_timeout_s,
    )


class InFlightCalls:
    """Calls whose answers may be requested again. Lives in one event loop."""

    def __init__(self) -> None:
        self._offered: dict[_Key, list[InFlightCall]] = {}

    def begin(self, request: RetryKey | None, *, streams: bool = False) -> InFlightCall:
        """Return a call that is about to be made: a context manager around it."""
        return InFlightCall(self._offered, request, shared=request is not None and request.idempotent and not streams)

    def find(self, request: RetryKey | None) -> InFlightCall | None:
        """Return the earlier call that a request repeats, if any."""
        if request is None or not (request.number or request.idempotent) or request.key not in self._offered:
            return None
        return self._offered[request.key][0]


class InFlightCall:
    """One call, and the future answer that its clients wait for."""

    def __init__(self, offered: dict[_Key, list[InFlightCall]], request: RetryKey | None, *, shared: bool) -> None:
        """`shared`: whether other requests may join while the first client waits."""
        self._offered = offered
        self._request = request
        self._shared = shared
        self._num_waiting = 1
        self._cancel: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answer = None if request is None else asyncio.get_running_loop().create_future()

    @property
    def is_client_gone(self) -> bool:
        """True if the client that made the call has gone, so that the answer is for a retry."""
        return self._cancel is not None

    def __enter__(self) -> Self:
        if self._shared:
            self._offer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel = None
        if self._answer is None or (self._answer.done() and not self._answer.cancelled()):
            return
        self._withdraw()
        if isinstance(error, Exception) and not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # Possibly no client waits.
        self._answer.cancel()

    def complete(self, body: bytes) -> None:
        """Give the answer to the clients that wait for it, and keep it a while for one that may come back."""
        if self._request is None or self._answer is None or self._answer.done():
            return
        if not (self._shared or self.is_client_gone):
            if not self._request.will_retry:
                return
            # The client may be timing out at this very moment.
            self._offer(for_s=self._request.pause_s)
        self._answer.set_result(body)
        if len(body) > _MAX_KEPT_BYTES:
            self._withdraw()
        elif self._timer is None and self in self._offered.get(self._request.key, ()):
            self._offer(for_s=_KEPT_S)

    def client_gone(self, request: RetryKey | None, cancel: Callable[[], None] | None = None) -> bool:
        """Note that a client has gone; return whether the call continues, until `cancel` is called."""
        if self._answer is None or request is None:
            return False
        self._num_waiting -= 1
        if not (self._num_waiting or self._answer.done()):
            if not request.will_retry:
                self._expire()
                return False
            self._offer(for_s=request.pause_s)
        self._cancel = cancel or self._cancel
        return True

    def join(self, request: RetryKey) -> asyncio.Future[bytes]:
        """Return the future answer for one more client, or the error that the call ends with."""
        assert self._answer is not None
        if not (self._num_waiting or self._answer.done()):
            self._offer()
        self._num_waiting += 1
        if not request.idempotent:
            self._withdraw()  # Each retry has a call of its own.
        return self._answer

    def _offer(self, *, for_s: float | None = None) -> None:
        """Let retries join the call, for some seconds or until it is withdrawn."""
        assert self._request is not None
        calls = self._offered.setdefault(self._request.key, [])
        if self not in calls:
            calls.append(self)
        self._stop_timer()
        if for_s is not None:
            self._timer = asyncio.get_running_loop().call_later(for_s, self._expire)

    def _withdraw(self) -> None:
        self._stop_timer()
        assert self._request is not None
        calls = self._offered.get(self._request.key, [])
        if self in calls:
            calls.remove(self)
        if not calls:
            self._offered.pop(self._request.key, None)

    def _expire(self) -> None:
        """Stop offering the call; cancel it if no client waits for it."""
        self._withdraw()  # Before the call has ended: no client may join it meanwhile.
        if not self._num_waiting and self._answer is not None and self._answer.cancel() and self._cancel is not None:
            self._cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
