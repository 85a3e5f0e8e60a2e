"""Several replicas of one inference server as one upstream.

Calls of one session go to one replica, which has their prompts in its prefix cache: rendezvous hashing with bounded
loads. Calls wait while no replica answers, because clients give up at the first 429 or 5xx. A call that got no answer
is retried, on another replica first, unless some of its answer has been passed on. Pausing holds new calls around an
update of weights. Limits on calls in progress are left to the servers, which have queues of their own; replicas that
come and go, and other kinds of balancing, are left to a load balancer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from hashlib import blake2b

from rllm.capture import PriorAnswer
from rllm.errors import ConfigError, InferenceError
from rllm.gateway.config import PoolConfig
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.base import Route, UpstreamCall
from rllm.gateway.upstream.http import HTTPUpstream
from rllm.types import JSONMapping, JSONObject, Message

logger = logging.getLogger(__name__)

# A call during which several replicas have died may be the cause of it.
_MAX_BROKEN_OFF = 2
# `hold_timeout_s` bounds each wait, this bounds their number.
_MAX_RETRIES = 16
# A replica gets at most this multiple of an equal share of the calls in progress, whatever the hash.
_LOAD_FACTOR = 1.25
# Seconds before the first check of a replica that is down, and after its first refusal; doubled each time.
_FIRST_PAUSE_S = 0.25
# Calls wait for a minute only, so a longer `Retry-After` would fail them just before the replica is asked again.
_MAX_REST_S = 30.0
_CHECK_TIMEOUT_S = 5.0


class Replica:
    """One server of a pool: up, resting for a time after a refusal, or down until it answers a check."""

    def __init__(self, id: int, upstream: HTTPUpstream) -> None:
        self.id = id
        self.upstream = upstream
        self.in_flight = 0
        self.num_calls = 0
        self.problem: str | None = None
        """Reason why it is down or resting."""
        self.is_lost = False
        """True if it is down for good."""
        self.recovery: asyncio.Task[None] | None = None
        self._usable_from = 0.0

    @property
    def address(self) -> str:
        return self.upstream.base_url

    @property
    def up(self) -> bool:
        """True if it takes calls, as far as is known."""
        return self._usable_from <= time.monotonic()

    @property
    def is_down(self) -> bool:
        return self._usable_from == math.inf

    def refused(self, error: UpstreamError, rest_s: float) -> float:
        """Rest for `rest_s` seconds after a refusal, or as long as the server asks for; return the seconds left."""
        if self.up:  # Of many calls that are refused together, the first one counts.
            rest_s = min(error.retry_after_s or rest_s, _MAX_REST_S)
            self._usable_from = time.monotonic() + rest_s
            self.problem = str(error)
            logger.warning("upstream %s: resting for %.1f s: %s", self.address, rest_s, error)
        return max(self._usable_from - time.monotonic(), 0.0)

    def failed(self, error: Exception) -> None:
        """Mark the replica as down until it answers a check."""
        self.problem = str(error)
        self.is_lost = isinstance(error, UpstreamError) and error.fault == "lost"
        if not self.is_down:
            self._usable_from = math.inf
            logger.warning("upstream %s is down, and gets no calls until it answers: %s", self.address, error)

    async def check(self) -> None:
        """Check that the server answers, and mark the replica as up or down; a timeout changes neither.

        Raises:
            InferenceError: if it does not answer.
        """
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self.upstream.check()
        except TimeoutError as error:
            raise UpstreamError(f"the upstream {self.address} did not answer within {_CHECK_TIMEOUT_S:g} s") from error
        except UpstreamError as error:
            if error.fault != "call":
                self.failed(error)
            elif error.status_code < 500:  # It answers, without listing its models.
                self._recovered()
            raise
        self._recovered()

    def _recovered(self) -> None:
        if self.is_down:
            logger.warning("upstream %s answers again", self.address)
            self._usable_from, self.problem, self.is_lost = 0.0, None, False

    def to_dict(self) -> JSONObject:
        """Return its state for an operator."""
        return {
            "id": self.id,
            "url": self.address,
            "state": "up" if self.up else "down",
            "problem": None if self.up else self.problem,
            "in_flight": self.in_flight,
            "num_calls": self.num_calls,
        }


class UpstreamPool:
    """An `Upstream` of several HTTP upstreams. Belongs to the event loop that first uses it, until it is closed."""

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], HTTPUpstream] = HTTPUpstream,
        config: PoolConfig | None = None,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            urls: URLs of the replicas, which must serve the same model.
            connect: makes the upstream of a URL.
            config: limits.

        Raises:
            ConfigError: if no URL is given, if one is given twice, or if one is not a web address.
        """
        if not urls:
            raise ConfigError("upstream: give the base URL of at least one inference server")
        self.replicas = [Replica(number, connect(url)) for number, url in enumerate(urls, 1)]
        addresses = [replica.address for replica in self.replicas]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ConfigError(f"upstream={address!r} is given twice: name each replica once")
        self.paused = False
        self.weight_version: int | None = None
        self._config = config or PoolConfig()
        self._any = self.replicas[0].upstream
        self.num_waiting = 0
        self._changed = asyncio.Event()
        """Set, and replaced, when calls that wait may look for a replica."""

    # Upstream.

    def prepare(self, request: JSONMapping) -> JSONObject:
        return self._any.prepare(request)

    def ignored(self, request: JSONMapping) -> Sequence[str]:
        return self._any.ignored(request)

    def continued_prompt(self, request: JSONMapping, prior: PriorAnswer) -> Sequence[int] | None:
        return self._any.continued_prompt(request, prior)

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        return self._any.lost(messages, tools)

    async def complete(self, call: UpstreamCall) -> JSONObject:
        while True:
            replica = await self.acquire(call.route)
            with self._attempt(replica, call.route):
                return await replica.upstream.complete(call)

    async def stream(self, call: UpstreamCall) -> AsyncGenerator[list[JSONObject], None]:
        while True:
            replica = await self.acquire(call.route)
            with self._attempt(replica, call.route):
                async with aclosing(replica.upstream.stream(call)) as batches:
                    async for batch in batches:
                        call.route.is_passed_on = True
                        yield batch
                return

    async def models(self) -> list[JSONObject]:
        """Return the models of the first replica that lists them."""
        problem: InferenceError | None = None
        for replica in sorted(self.replicas, key=lambda replica: not replica.up):
            try:
                return await replica.upstream.models()
            except InferenceError as error:
                problem = error
        assert problem is not None
        raise problem

    async def check(self) -> None:
        """Return as soon as one replica answers, else raise `InferenceError`."""
        if self.paused:
            raise InferenceError("the upstreams are paused: calls wait until POST /upstreams/resume", status_code=503)
        checks = [asyncio.create_task(replica.check()) for replica in self.replicas]
        problems = []
        try:
            for check in asyncio.as_completed(checks):
                try:
                    await check
                except InferenceError as error:
                    problems.append(str(error))
                else:
                    self._wake_all()
                    return
        finally:
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        raise InferenceError("; ".join(problems))

    async def close(self) -> None:
        """Release connections and stop checking."""
        tasks = [replica.recovery for replica in self.replicas if replica.recovery is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.recovery = None
            await replica.upstream.close()

    # Operation.

    @property
    def in_flight(self) -> int:
        """Calls in progress at all replicas."""
        return sum(replica.in_flight for replica in self.replicas)

    @property
    def all_down(self) -> bool:
        """True if calls wait because no replica answers, rather than because of a pause."""
        return not self.paused and not any(replica.up for replica in self.replicas)

    def pause(self) -> None:
        """Hold new calls; those in progress continue."""
        self.paused = True

    def resume(self) -> None:
        """Release held calls, and hold no more."""
        self.paused = False
        self._wake_all()

    def publish(self, weight_version: int) -> None:
        """Set the version of the weights that all replicas have from now on; traces record it."""
        self.weight_version = weight_version

    def to_dict(self) -> JSONObject:
        """Return the pool's state for an operator."""
        return {
            "paused": self.paused,
            "weight_version": self.weight_version,
            "waiting": self.num_waiting,
            "in_flight": self.in_flight,
            "replicas": [replica.to_dict() for replica in self.replicas],
        }

    # Routing of one call.

    @contextmanager
    def _attempt(self, replica: Replica, route: Route) -> Iterator[None]:
        """Suppress the failure of one attempt at a call if the call is to be retried; release the replica anyway."""
        began = time.monotonic()
        try:
            yield
        except UpstreamError as error:
            if not self._retries(replica, route, error, began):
                raise
        else:
            if self.weight_version != route.weight_version:
                route.updated_to = self.weight_version
        finally:
            replica.in_flight -= 1

    async def acquire(self, route: Route) -> Replica:
        """Return a replica for the call, which counts as in progress there.

        Raises:
            UpstreamError: if none is available in time.
        """
        if route.deadline is None:
            route.deadline = time.monotonic() + self._config.total_timeout_s
        for down in self.replicas:
            if down.is_down:
                self._start_recovery(down)
        replica = self._pick(route) or await self._wait(route, route.deadline)
        replica.in_flight += 1
        replica.num_calls += 1
        route.weight_version = self.weight_version
        return replica

    def _pick(self, route: Route) -> Replica | None:
        """Return the replica for a call, or `None` if no replica can take it now."""
        able = [replica for replica in self.replicas if replica.up]
        if self.paused or not able:
            return None
        failed_at = route.retries[-1]["replica"] if route.retries else None
        if len(self.replicas) == 1:
            route.replica = able[0].address if route.retries else None
            return able[0]
        most = math.ceil(_LOAD_FACTOR * (self.in_flight + 1) / len(able))

        def order(replica: Replica) -> tuple[bool, bool, object]:
            has_failed = replica.address == failed_at
            if route.session_id is None:
                return has_failed, False, (replica.in_flight, replica.num_calls)
            return has_failed, replica.in_flight >= most, preference(route.session_id, replica.address)

        picked = min(able, key=order)
        route.replica = picked.address
        return picked

    async def _wait(self, route: Route, deadline: float) -> Replica:
        """Hold a call until a replica takes it."""
        began = time.monotonic()
        down_since: float | None = None
        self.num_waiting += 1
        try:
            while (replica := self._pick(route)) is None:
                if all(replica.is_lost for replica in self.replicas):
                    raise UpstreamError(self._problems(), status_code=503)
                down_since = (down_since or time.monotonic()) if self.all_down else None
                until = deadline if down_since is None else min(deadline, down_since + self._config.hold_timeout_s)
                try:
                    async with asyncio.timeout(until - time.monotonic()):
                        await self._changed.wait()
                except TimeoutError:
                    if self.all_down or time.monotonic() >= deadline:
                        raise self._no_room(time.monotonic() - began, deadline) from None
            return replica
        finally:
            route.queue_s += time.monotonic() - began
            self.num_waiting -= 1

    def _wake_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _retries(self, replica: Replica, route: Route, error: UpstreamError, began: float) -> bool:
        """Record a failed attempt, and return whether to retry the call; not if the agent has some of the answer."""
        if error.fault == "call":
            return False
        if error.fault == "refused":
            rest_s = replica.refused(error, _backoff_s(len(route.retries), self._config.check_interval_s))
            # The event loop's timers may be early by their resolution.
            asyncio.get_running_loop().call_later(rest_s + 0.005, self._wake_all)
        else:
            replica.failed(error)
            self._start_recovery(replica)
        num_broken_off = sum(retry["fault"] == "broke_off" for retry in route.retries)
        has_broken = error.fault == "broke_off" and num_broken_off >= _MAX_BROKEN_OFF
        if route.is_passed_on or has_broken or len(route.retries) >= _MAX_RETRIES:
            return False
        attempt = {"replica": replica.address, "fault": error.fault, "status": error.status_code}
        route.retries.append({**attempt, "error": str(error), "lost_s": time.monotonic() - began})
        return True

    def _start_recovery(self, replica: Replica) -> None:
        if replica.recovery is None or replica.recovery.done():
            replica.recovery = asyncio.create_task(self._recover(replica))

    async def _recover(self, replica: Replica) -> None:
        """Check a replica that is down until it answers."""
        num_checks = 0
        while replica.is_down:
            await asyncio.sleep(_backoff_s(num_checks, self._config.check_interval_s))
            with suppress(InferenceError):
                await replica.check()
            num_checks += 1
            if replica.is_lost:
                break
        self._wake_all()

    def _no_room(self, waited_s: float, deadline: float) -> UpstreamError:
        """Return the error of a call that waited in vain."""
        if time.monotonic() >= deadline:
            why = "they are paused" if self.paused else "they are down"
            return UpstreamError(
                f"no upstream took the call within its total time of {self._config.total_timeout_s:g} s: {why}",
                status_code=504,
            )
        return UpstreamError(
            f"no upstream answered for the {waited_s:.1f} s that the call waited: {self._problems()}",
            status_code=503,
            retry_after_s=self._config.check_interval_s,
        )

    def _problems(self) -> str:
        return "; ".join(sorted({replica.problem for replica in self.replicas if replica.problem}))


def _backoff_s(num_failures: int, longest_s: float) -> float:
    return min(_FIRST_PAUSE_S * 2.0 ** min(num_failures, 20), longest_s) * random.uniform(0.75, 1.0)


def preference(session_id: str, address: str) -> bytes:
    """Return a session's preference for a replica: the lowest value comes first."""
    return blake2b(f"{session_id}\0{address}".encode(errors="surrogatepass"), digest_size=8).digest()
