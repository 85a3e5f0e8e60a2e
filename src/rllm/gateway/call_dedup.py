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
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Pause of these SDKs before their first retry, doubled before each further one, and its maximum."""
_MARGIN_S = 2.0

_Key = tuple[Session, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryKey:
    """One request for an answer that may be requested several times."""

    key: _Key
    """Session (not its name, which may be reused), and hash of body and metadata header."""
    number: int = 0
    """Number of earlier requests of the client for this answer."""
    read_timeout_s: float
    """Read timeout of the client."""
    began: float = field(default_factory=time.monotonic)

    @property
    def will_retry(self) -> bool:
        """True if a client that leaves now has timed out, rather than lost interest."""
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
    count = headers.get(_RETRY_COUNT, b"")
    if session is None or not count.isdigit():
        return None
    timeout = next((headers[name] for name in _READ_TIMEOUTS if name in headers), b"")
    try:
        read_timeout_s = float(timeout)
    except ValueError:
        return None
    key = (session, hash((body, headers.get(METADATA_HEADER.encode()))))
    return RetryKey(key=key, number=int(count[:4]), read_timeout_s=read_timeout_s)


class InFlightCalls:
    """Calls whose answers may be requested again. Lives in one event loop."""

    def __init__(self) -> None:
        self._offered: dict[_Key, InFlightCall] = {}

    def begin(self, request: RetryKey | None) -> InFlightCall:
        """Return a call that is about to be made: a context manager around it."""
        return InFlightCall(self._offered, request)

    def find(self, request: RetryKey | None) -> InFlightCall | None:
        """Return the earlier call that a request repeats, if any."""
        return None if request is None or not request.number else self._offered.get(request.key)


class InFlightCall:
    """One call, and the future answer for a client that has left and may come back."""

    def __init__(self, offered: dict[_Key, InFlightCall], request: RetryKey | None) -> None:
        self._offered = offered
        self._request = request
        self._answer: asyncio.Future[bytes] | None = None
        self._cancel: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_client_gone(self) -> bool:
        """True if the client that made the call has gone, so that the answer is for a retry."""
        return self._cancel is not None

    def __enter__(self) -> Self:
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
        """Give the answer to the client that waits for it, and keep it for one that is just timing out."""
        if self._answer is None and self._request is not None and self._request.will_retry:
            self._offer(self._request)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(body)

    def client_gone(self, request: RetryKey | None, cancel: Callable[[], None] | None = None) -> bool:
        """Note that a client has gone; return whether the call continues, until `cancel` is called."""
        if request is None or not request.will_retry:
            self._expire()
            return False
        self._cancel = cancel or self._cancel
        self._offer(request)
        return True

    def join(self) -> asyncio.Future[bytes]:
        """Return the future answer for one client that came back, or the error that the call ends with."""
        assert self._answer is not None
        self._withdraw()  # Each retry has a call of its own.
        return self._answer

    def _offer(self, request: RetryKey) -> None:
        """Let a retry join the call while the client may come back."""
        loop = asyncio.get_running_loop()
        self._answer = self._answer or loop.create_future()
        self._withdraw()
        self._offered[request.key] = self
        self._timer = loop.call_later(request.pause_s, self._expire)

    def _withdraw(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None and self._offered.get(self._request.key) is self:
            del self._offered[self._request.key]

    def _expire(self) -> None:
        """Stop offering the call, and cancel it: no client waits for it."""
        self._withdraw()
        if self._answer is not None and self._answer.cancel() and self._cancel is not None:
            self._cancel()
