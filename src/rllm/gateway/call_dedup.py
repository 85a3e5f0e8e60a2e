"""Deduplication of calls that clients repeat after a timeout: sampled once, traced once.

A client that times out closes its connection and sends the same request again. So a call whose client leaves after
about its read timeout continues for as long as the client may take to come back, and the repeated request gets its
answer. A client that leaves earlier is gone for good. Only a request that is marked as a retry is treated as one,
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
from rllm.gateway.sessions import SessionState

_RETRY_COUNT = b"x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: 0 first, then 1, 2, ... for the same call."""
_READ_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
_PAUSE_S = 10.0
"""Seconds that a client may take to come back; these SDKs take 8 at most."""

_Key = tuple[SessionState, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryKey:
    """One request for an answer that may be requested several times."""

    key: _Key
    """Session (not its name, which may be reused), and hash of body and metadata header."""
    is_retry: bool = False
    """True if the client has requested this answer before."""
    read_timeout_s: float
    """Read timeout of the client."""
    began: float = field(default_factory=time.monotonic)

    @property
    def will_retry(self) -> bool:
        """True if a client that leaves now has timed out, rather than lost interest."""
        # The client's clock began before ours, and no clock is exact on a busy machine.
        return time.monotonic() - self.began >= 0.5 * self.read_timeout_s


def retry_key(headers: Mapping[bytes, bytes], session: SessionState | None, body: bytes) -> RetryKey | None:
    """Return the retry key of a request, or `None` if its retry would look like another call.

    Args:
        headers: headers of the request.
        session: session that the request names: without one, equal requests may come from different agents.
        body: body of the request; a retry has the same.
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
    return RetryKey(key=key, is_retry=int(count[:4]) > 0, read_timeout_s=read_timeout_s)


class InFlightCall:
    """One call, and its answer for a client that has left at its timeout and may come back.

    The call is made in its `with` block; if the block raises, a retry that has joined it gets the same error.
    """

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.cut: Callable[[], None] | None = None
        """Function that ends the call; set once its client has gone, so that the answer is for a retry."""

    @property
    def is_client_gone(self) -> bool:
        return self.cut is not None

    def cancel(self) -> None:
        """End the call, unless it has ended or its own client waits for it."""
        if self.cut is not None and not self.answer.done():
            self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self.is_client_gone:
            # Only then may a retry be waiting. Otherwise the error, which refers to the call, would make a cycle.
            self.answer.set_exception(error)
            self.answer.exception()  # otherwise asyncio logs an error that is never read
        self.answer.cancel()
        self.cut = None


class InFlightCalls:
    """Calls whose answers may be requested again. Lives in one event loop."""

    def __init__(self) -> None:
        self._offered: dict[_Key, tuple[InFlightCall, asyncio.TimerHandle]] = {}

    def offer(self, request: RetryKey | None, call: InFlightCall) -> bool:
        """Let a retry join a call as long as its client may come back; return whether that is to be expected.

        If no retry comes, the call is cancelled.
        """
        if request is None or not request.will_retry:
            return False
        timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._expire, request.key, call)
        self._offered[request.key] = call, timer
        return True

    def client_gone(self, request: RetryKey | None, call: InFlightCall, cut: Callable[[], None]) -> bool:
        """Offer a call whose client has gone; return whether it continues, until `cut` is called."""
        is_offered = self.offer(request, call)
        call.cut = cut if is_offered else None
        return is_offered

    def join(self, request: RetryKey | None) -> InFlightCall | None:
        """Return the earlier call that a request repeats, if any; a further retry gets a call of its own."""
        if request is None or not request.is_retry or request.key not in self._offered:
            return None
        call, timer = self._offered.pop(request.key)
        timer.cancel()
        return call

    def _expire(self, key: _Key, call: InFlightCall) -> None:
        if self._offered.get(key, (None,))[0] is call:
            del self._offered[key]
        call.cancel()
