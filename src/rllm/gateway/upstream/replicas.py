"""The replicas of a pool: which of them takes a call, which calls wait for one, and what an operator does with them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError
from rllm.gateway.errors import GatewayError, UpstreamError
from rllm.gateway.upstream.http import HTTPUpstream
from rllm.gateway.upstream.line import WaitingLine
from rllm.gateway.upstream.replica import Replica
from rllm.gateway.upstream.route import Route

_MAX_SESSIONS = 100_000
"""Whose replica is remembered, the latest used ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """How much a pool takes on, and how long it waits."""

    max_in_flight: int = 1024
    """Calls under way at one replica; further ones wait in the gateway."""
    max_waiting: int = 10_000
    """Calls that wait; further ones are refused with status 503 and `Retry-After`."""
    hold_timeout_s: float = 60.0
    """How long a call is held while no replica answers. Where they are paused or full it is held until `total_timeout_s`."""
    total_timeout_s: float = 3600.0
    """What a call may take in all, waiting and retries included."""
    check_interval_s: float = 10.0
    """After how long a replica is asked whether it is there, if no call has shown it."""

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ConfigError(f"max_in_flight={self.max_in_flight}: a replica needs room for 1 call or more")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting={self.max_waiting}: use 0 to refuse what finds no room, or more")
        for name in ("hold_timeout_s", "total_timeout_s", "check_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: use a number of seconds above 0")


class ReplicaSet:
    """Belongs to the event loop that first uses it, until it is closed."""

    def __init__(self, urls: Sequence[str], connect: Callable[[str], HTTPUpstream], config: PoolConfig) -> None:
        """As `UpstreamPool`'s.

        Raises:
            ConfigError: if there is no URL, one twice, or one that is not a web address.
        """
        if not urls:
            raise ConfigError("upstream: give the base URL of at least one inference server")
        self.paused = False
        self.weight_version: int | None = None
        self._config = config
        self._connect = connect
        self._replicas: list[Replica] = []
        self._leaving: list[Replica] = []
        """Those that are removed, while they answer their last calls."""
        self._num_added = 0
        self._num_picks = 0
        self._of_session: OrderedDict[str, Replica] = OrderedDict()
        self._waiting = WaitingLine()
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._idle: asyncio.Event | None = None
        """Set when a replica has no call under way; made when somebody waits for that."""
        for url in urls:
            self.add(url)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def in_flight(self) -> int:
        """Calls under way at any replica, removed ones included."""
        return self._num_in_flight(None)

    @property
    def num_waiting(self) -> int:
        """Calls that are held."""
        return len(self._waiting)

    @property
    def all_paused(self) -> bool:
        """Whether it is an operator who holds the calls."""
        return self.paused or (bool(self._replicas) and all(replica.paused for replica in self._replicas))

    @property
    def all_down(self) -> bool:
        """Whether calls are held because nobody answers, rather than for want of room, or by an operator."""
        return not self.paused and not any(replica.up or replica.paused for replica in self._replicas)

    @property
    def all_lost(self) -> bool:
        """Whether nobody will answer who is there now."""
        return bool(self._replicas) and all(replica.is_lost for replica in self._replicas)

    # What an operator asks for.

    def add(self, url: str) -> Replica:
        """Send calls to one more replica.

        Raises:
            ConfigError: if the URL is not a web address, or if it is there already.
        """
        upstream = self._connect(url)
        if any(replica.address == upstream.base_url for replica in self._replicas):
            raise ConfigError(f"upstream={upstream.base_url!r} is there already: give every replica once")
        self._num_added += 1
        replica = Replica(
            self._num_added,
            upstream,
            max_in_flight=self._config.max_in_flight,
            check_interval_s=self._config.check_interval_s,
            on_change=self._waiting.call_all,
        )
        replica.weight_version = self.weight_version
        self._replicas.append(replica)
        if self._watches:
            self.watch()
        self._waiting.call_all()
        return replica

    def remove(self, replica_id: int) -> Replica:
        """Send no more calls to a replica. Those that it has go on; its connections close with the last of them.

        Raises:
            GatewayError: 404, if there is none of this id.
        """
        [replica] = self._chosen(replica_id)
        replica.removed = True
        self._replicas.remove(replica)
        if watch := self._watches.pop(replica.id, None):
            watch.cancel()
        if replica.in_flight:
            self._leaving.append(replica)
        else:
            replica.upstream.close_idle()
        self._waiting.call_all()
        return replica

    def pause(self, replica_id: int | None = None) -> None:
        """Hold new calls, of all replicas or to one of them; those under way go on.

        Raises:
            GatewayError: 404, if there is none of this id.
        """
        if replica_id is None:
            self.paused = True
        else:
            for replica in self._chosen(replica_id):
                replica.paused = True

    def resume(self, replica_id: int | None = None) -> None:
        """Let calls go again that were held by `pause`, in the order in which they came.

        Raises:
            GatewayError: 404, if there is none of this id.
        """
        if replica_id is None:
            self.paused = False
        for replica in self._chosen(replica_id):
            replica.paused = False
        self._waiting.call_all()

    async def drain(self, timeout_s: float, replica_id: int | None = None) -> int:
        """Wait until no call is under way, at all or at one replica; returns how many are, if the time is over.

        Raises:
            GatewayError: 404, if there is none of this id.
        """
        self._idle = self._idle or asyncio.Event()
        self._chosen(replica_id)
        deadline = time.monotonic() + timeout_s
        while (num_left := self._num_in_flight(replica_id)) and time.monotonic() < deadline:
            self._idle.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._idle.wait()
            except TimeoutError:
                continue
        return num_left

    def publish(self, weight_version: int, replica_id: int | None = None) -> None:
        """Note which weights the replicas have from now on; every trace says which ones answered it.

        Raises:
            GatewayError: 404, if there is none of this id.
        """
        if replica_id is None:
            self.weight_version = weight_version
        for replica in self._chosen(replica_id):
            replica.weight_version = weight_version

    def to_dict(self) -> dict[str, Any]:
        """What an operator is told."""
        return {
            "paused": self.paused,
            "weight_version": self.weight_version,
            "waiting": self.num_waiting,
            "in_flight": self.in_flight,
            "replicas": [replica.to_dict() for replica in (*self._replicas, *self._leaving)],
        }

    # What a call asks for.

    async def acquire(self, route: Route) -> Replica:
        """A replica with room for the call, which is taken until `release`.

        Raises:
            UpstreamError: if there is none in time.
            GatewayError: 503, if too many calls wait for one.
        """
        if not self._watches:
            self.watch()
        if route.deadline is None:
            route.deadline = time.monotonic() + self._config.total_timeout_s
        replica = self._pick(route) if not self._waiting else None
        if replica is None:
            replica = await self._wait(route, route.deadline)
        replica.in_flight += 1
        replica.num_calls += 1
        route.weight_version = replica.weight_version
        return replica

    def _pick(self, route: Route) -> Replica | None:
        """Where the session's prompts are cached, else where least is under way; `None` if nobody takes calls."""
        if self.paused:
            return None
        if len(self._replicas) == 1:
            [replica] = self._replicas
            route.replica = replica.address if route.retries else None
            return replica if replica.takes_calls else None
        failed_at = route.retries[-1]["replica"] if route.retries else None
        picked = self._of_session.get(route.session_id) if route.session_id is not None else None
        if picked is None or not picked.takes_calls or picked.address == failed_at:
            able = [replica for replica in self._replicas if replica.takes_calls]
            if not able:
                return None
            picked = min(able, key=lambda other: (other.address == failed_at, other.in_flight, other.picked_at))
        if route.session_id is not None:
            self._remember(route.session_id, picked)
        self._num_picks += 1
        picked.picked_at = self._num_picks
        route.replica = picked.address
        return picked

    def _remember(self, session_id: str, replica: Replica) -> None:
        self._of_session[session_id] = replica
        self._of_session.move_to_end(session_id)
        if len(self._of_session) > _MAX_SESSIONS:
            self._of_session.popitem(last=False)

    async def _wait(self, route: Route, deadline: float) -> Replica:
        """Hold a call until a replica takes it."""
        if len(self._waiting) >= self._config.max_waiting:
            raise GatewayError(
                503,
                f"{len(self._waiting):,} calls wait for the inference servers already: make fewer at a time, add servers, "
                "or raise max_waiting",
                code="overloaded",
                retry_after_s=1.0,
            )
        began = time.monotonic()
        down_since: float | None = None
        place = self._waiting.join()
        try:
            while True:
                if self.all_lost:
                    raise self._no_room(route, time.monotonic() - began)
                down_since = (down_since or time.monotonic()) if self.all_down else None
                until = deadline if down_since is None else min(deadline, down_since + self._config.hold_timeout_s)
                try:
                    await self._waiting.called(place, until)
                except TimeoutError:
                    if self.all_down or time.monotonic() >= deadline:
                        raise self._no_room(route, time.monotonic() - began) from None
                if (replica := self._pick(route)) is not None:
                    return replica
        finally:
            route.queue_s += time.monotonic() - began
            self._waiting.leave(place)

    def release(self, replica: Replica) -> None:
        """Give back what `acquire` took."""
        replica.in_flight -= 1
        if self._waiting:
            self._waiting.call_next()
        if not replica.in_flight:
            if replica.removed:
                self._leaving.remove(replica)
                replica.upstream.close_idle()
            if self._idle is not None:
                self._idle.set()

    def failed(self, replica: Replica, error: UpstreamError) -> None:
        """Note what a failed call says about its replica."""
        if error.fault == "call":
            if error.status_code == 504:
                replica.suspect()
            return
        if error.fault == "refused":
            # A little later than it rests: the event loop's timers may be early by their resolution.
            asyncio.get_running_loop().call_later(replica.refused(error) + 0.005, self._waiting.call_all)
        else:
            replica.failed(error)
        if self.all_down:
            self._waiting.call_all()  # What is held for want of room is held for less long from here on.

    def watch(self) -> None:
        """Check every replica from time to time, from now on."""
        for replica in self._replicas:
            if replica.id not in self._watches:
                self._watches[replica.id] = asyncio.create_task(replica.watch())

    async def close(self) -> None:
        """Release connections and stop checking."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        self._watches.clear()
        for replica in (*self._replicas, *self._leaving):
            await replica.upstream.close()

    def _no_room(self, route: Route, waited_s: float) -> UpstreamError:
        """What to tell a call that was held in vain."""
        if time.monotonic() >= (route.deadline or 0.0):
            why = "they are paused" if self.paused else "they are busy, down or paused"
            message = (
                f"the call took its total time of {self._config.total_timeout_s:g} s: no upstream took it, as {why}"
            )
            return UpstreamError(message, status_code=504)
        problems = "; ".join(sorted({replica.problem for replica in self._replicas if replica.problem}))
        if self.all_lost:
            return UpstreamError(problems, status_code=503)
        return UpstreamError(
            f"no upstream answered for the {waited_s:.1f} s that the call was held: "
            f"{problems or 'all of them were removed: add one with POST /upstreams'}",
            status_code=503,
            retry_after_s=self._config.check_interval_s,
        )

    def _chosen(self, replica_id: int | None) -> list[Replica]:
        """All replicas, or the one of this id; raises `GatewayError` if there is none."""
        if replica_id is None:
            return self._replicas
        chosen = [replica for replica in self._replicas if replica.id == replica_id]
        if not chosen:
            known = ", ".join(str(replica.id) for replica in self._replicas) or "none"
            raise GatewayError(404, f"there is no upstream {replica_id}: there are {known}", code="upstream_not_found")
        return chosen

    def _num_in_flight(self, replica_id: int | None) -> int:
        """At any replica, or at the one of this id, which may be removed by now."""
        replicas = (*self._replicas, *self._leaving)
        return sum(replica.in_flight for replica in replicas if replica_id in (None, replica.id))
