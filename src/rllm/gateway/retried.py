"""Calls that their clients make again: generated once, traced once.

A client that waits no longer closes its connection and asks the same again. By then the first answer is under way or just
done. So the call goes on for as long as the client takes to come back, and the second request gets the first one's answer.
A client that leaves for good is told apart by what it sends: with every call how long it reads, and how often it has asked.

Only a request that says that it is a retry is taken for one. Agents sample the same prompt several times on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeAlias

from rllm.gateway.identity import METADATA_HEADER
from rllm.gateway.sessions import Session

_RETRY_COUNT = b"x-stainless-retry-count"
"""What the OpenAI and Anthropic SDKs send: 0 first, then 1, 2, ... for the same call."""
_READ_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
_IDEMPOTENCY_KEY = b"idempotency-key"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Of these SDKs before their first retry, doubled before each that follows, and at most."""
_MARGIN_S = 2.0
_KEPT_S = 10.0
"""How long an answer is kept for a call with an idempotency key."""
_MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of all answers that are kept for clients who may come back."""

_Key = tuple[Session | None, bytes, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One request for an answer that may be asked for several times."""

    key: _Key
    """Session (not its name, which another one may have once it is deleted), idempotency key, and hash of the body and of the
    call's metadata: equal requests of two agents of a session are told apart by what these say of themselves."""
    number: int = 0
    """How often the client has asked before."""
    read_timeout_s: float | None = None
    """After how long a silence the client gives up."""
    began: float = field(default_factory=time.monotonic)

    @property
    def idempotent(self) -> bool:
        return bool(self.key[1])

    @property
    def comes_back(self) -> bool:
        """Whether a client that leaves now has lost its patience, rather than its interest."""
        if self.read_timeout_s is None:
            return self.idempotent
        # The client's clock began before ours, and nobody's is exact on a busy machine.
        return time.monotonic() - self.began >= 0.5 * self.read_timeout_s

    @property
    def pause_s(self) -> float:
        """How long it may take the client to ask again."""
        return min(_FIRST_PAUSE_S * 2.0 ** min(self.number, 8), _LONGEST_PAUSE_S) + _MARGIN_S


def attempt_of(headers: Mapping[bytes, bytes], session: Session | None, body: bytes) -> Attempt | None:
    """What a request says about its being asked again; `None` if nothing would tell its retry from another call.

    Args:
        headers: of the request.
        session: the one that the request names: without one, equal requests may be different agents'.
        body: of the request; a retry has the very same.
    """
    idempotency_key = headers.get(_IDEMPOTENCY_KEY, b"")
    count = headers.get(_RETRY_COUNT, b"")
    if not idempotency_key and (session is None or not count.isdigit()):
        return None
    timeouts = [headers[name] for name in _READ_TIMEOUTS if name in headers]
    return Attempt(
        key=(session, idempotency_key, hash((body, headers.get(METADATA_HEADER.encode())))),
        number=int(count[:4]) if count.isdigit() else 0,
        read_timeout_s=_seconds(timeouts[0]) if timeouts else None,
    )


def _seconds(header: bytes) -> float | None:
    try:
        return float(header)
    except ValueError:
        return None


_State: TypeAlias = Literal["awaited", "deserted", "landed", "over"]
"""Of a call. `awaited`: somebody waits for its answer. `deserted`: nobody does, and unless somebody asks again in time, which makes
it `awaited` once more, it is given up. It ends from either: `landed`, with an answer, or `over`, failed or given up, and then
nobody joins it any more."""


class Flight:
    """One call under way, and those who wait for its answer. `with` it while the call is made."""

    def __init__(self, flights: Flights, attempt: Attempt | None, *, shared: bool) -> None:
        """`shared`: whether others may join while somebody waits."""
        self._flights = flights
        self._attempt = attempt
        self._shared = shared
        self._state: _State = "awaited"
        self._num_waiting = 1
        self._cut: Callable[[], None] | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.size = 0

    @property
    def diverted(self) -> bool:
        """Whether the client that made the call has gone, so that the answer is for one who comes back."""
        return self._cut is not None

    def __enter__(self) -> Self:
        if self._shared and self._attempt is not None:
            self._flights.offer(self._attempt.key, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cut = None
        if self._attempt is None or self._state == "landed":
            return
        self._state = "over"
        self._flights.withdraw(self._attempt.key, self)
        if self._answer is not None and isinstance(error, Exception):
            self._answer.set_exception(error)
            self._answer.exception()  # Those who wait may all have gone.
        elif self._answer is not None:
            self._answer.cancel()

    def land(self, answer: bytes) -> None:
        """Give the answer to those who wait for it, and keep it a while for one who comes back."""
        attempt = self._attempt
        if attempt is None or self._state == "over":
            return
        if not (self._shared or self.diverted):
            if not attempt.comes_back:
                return
            # It took so long that the client may be giving up at this moment, which nobody has noticed yet.
            self._flights.offer(attempt.key, self, for_s=attempt.pause_s)
        self._state = "landed"
        self._awaited().set_result(answer)
        self._flights.keep(attempt.key, self, len(answer))

    def left(self, cut: Callable[[], None]) -> bool:
        """Note that the client of the call has gone; returns whether the call goes on, until `cut` is called."""
        if self._attempt is None or not self.left_by(self._attempt):
            return False
        self._cut = cut
        return True

    def left_by(self, attempt: Attempt) -> bool:
        """Note that one of those who wait has gone; returns whether the call goes on."""
        self._num_waiting -= 1
        if self._num_waiting or self._state != "awaited":
            return True
        if attempt.comes_back:
            self._state = "deserted"
            self._flights.offer(attempt.key, self, for_s=attempt.pause_s)
            return True
        self._give_up(attempt.key)
        return False

    def joined(self, attempt: Attempt) -> asyncio.Future[bytes]:
        """One more waits: for the whole answer, or the error that the call ends with."""
        self._num_waiting += 1
        if self._state == "deserted":
            self._state = "awaited"
            self._flights.offer(attempt.key, self)
        if not attempt.idempotent:
            self._flights.withdraw(attempt.key, self)  # Each retry has a call of its own.
        return self._awaited()

    def expire(self, key: _Key) -> None:
        """Note that nobody has come back in time."""
        self._flights.withdraw(key, self)
        if self._state == "deserted":
            self._give_up(key)

    def _give_up(self, key: _Key) -> None:
        self._state = "over"
        self._flights.withdraw(key, self)  # before it has ended: nobody may join it meanwhile
        if self._cut is not None:
            self._cut()

    def _awaited(self) -> asyncio.Future[bytes]:
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        return self._answer


class Flights:
    """The calls whose answers may be asked for again. Lives in one event loop."""

    def __init__(self) -> None:
        self._offered: dict[_Key, list[Flight]] = {}
        self._kept_bytes = 0
        self._untold = Flight(self, None, shared=False)

    def begin(self, attempt: Attempt | None, *, streams: bool = False) -> Flight:
        """A call that is about to be made; `None` for one whose retry could not be told."""
        if attempt is None:
            return self._untold
        return Flight(self, attempt, shared=attempt.idempotent and not streams)

    def find(self, attempt: Attempt | None) -> Flight | None:
        """The earlier call that this is a retry of, if there is one; then `Flight.joined` has its answer."""
        if attempt is None or not (attempt.number or attempt.idempotent) or attempt.key not in self._offered:
            return None
        return self._offered[attempt.key][0]

    def offer(self, key: _Key, flight: Flight, *, for_s: float | None = None) -> None:
        """Let others join a call, for so many seconds."""
        flights = self._offered.setdefault(key, [])
        if flight not in flights:
            flights.append(flight)
        self._stop_timer(flight)
        if for_s is not None:
            flight.timer = asyncio.get_running_loop().call_later(for_s, flight.expire, key)

    def keep(self, key: _Key, flight: Flight, size: int) -> None:
        """Go on to offer a call that has its answer, if there is room."""
        if flight not in self._offered.get(key, ()):
            return
        if self._kept_bytes + size > _MAX_KEPT_BYTES:
            self.withdraw(key, flight)
            return
        self._kept_bytes += size
        flight.size = size
        if flight.timer is None:
            self.offer(key, flight, for_s=_KEPT_S)

    def withdraw(self, key: _Key, flight: Flight) -> None:
        """Let nobody join a call any more."""
        self._stop_timer(flight)
        flights = self._offered.get(key, [])
        if flight in flights:
            flights.remove(flight)
            self._kept_bytes -= flight.size
            flight.size = 0
        if not flights:
            self._offered.pop(key, None)

    def _stop_timer(self, flight: Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None
