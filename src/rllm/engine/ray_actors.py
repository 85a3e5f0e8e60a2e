"""`RayRolloutRunner`: a `RolloutRunner` whose rollouts run in processes on the nodes of a Ray cluster.

Each attempt is one call of one process. A process that dies, alone or with its node, loses the attempts that it was
running; each is run again elsewhere, in a new session, so that it has exactly one episode and no tokens of the lost
run. An attempt that has lost two processes runs alone in the third, so that an attempt that kills processes fails
alone. A lost process is replaced as soon as a node has room.

Episodes leave a process as bytes; an episode that cannot be pickled is a failed rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from rllm.config.schema import RayConfig
from rllm.engine.capture import RemoteGateway
from rllm.engine.event_loop import CANCEL_GRACE_S, watched_loop
from rllm.engine.failures import failed_episode
from rllm.engine.ray_cluster import (
    OF_CODE,
    OF_DATA,
    ClusterNode,
    ImportPaths,
    alive_nodes,
    load_ray,
    on_node,
    packed,
    unpacked,
)
from rllm.engine.request import RolloutRequest, new_session_id
from rllm.engine.runner import RolloutRunner
from rllm.engine.scoring import Scoring
from rllm.errors import AgentError, ConfigError, RLLMError, RolloutError, RolloutTimeout, WorkerError, first_line
from rllm.sdk.variables import beside_own_keys
from rllm.types import Episode, JSONMapping

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Processes that may die under one attempt before it counts as the cause."""
GONE_S = 300.0
"""Seconds to wait for a process when none is left."""
CLOSE_S = 5.0
"""Seconds that processes may take to end by themselves."""
POLL_S = 0.05
REPLACE_EVERY_S = 1.0
SPARE_CALLS = 16
"""Calls that a process may answer in addition to its rollouts."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Everything that a process needs to run rollouts."""

    opening: bytes
    """Function that returns a context manager of a `Rollout`, as `packed` bytes."""
    runner: JSONMapping
    """Settings of a `RolloutRunner`."""
    paths: ImportPaths
    environment: Mapping[str, str]
    """Variables set before users' modules are imported; the node's own keys stay."""
    gateway: RemoteGateway | None = None
    """Gateway that must be reachable, if any."""


class RolloutActor:
    """Ray actor whose methods share an event loop."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._runner: RolloutRunner | None = None

    async def prepare(self, orders: Orders) -> None:
        """Prepare for `episode`.

        Raises:
            InferenceError: if the gateway cannot be reached from this node.
            Exception: raised by importing users' code.
        """
        if orders.gateway is not None:
            orders.gateway.check()
        os.environ.update(beside_own_keys(orders.environment, os.environ))
        orders.paths.apply()
        rollout: AbstractContextManager[Any] = unpacked(orders.opening)()
        self._runner = RolloutRunner(self._stack.enter_context(rollout), **orders.runner)
        self._stack.enter_context(watched_loop())

    async def episode(self, packed_attempt: bytes) -> bytes:
        """Return the episode of an attempt, which may have failed; raise errors that must end the run."""
        assert self._runner is not None, "prepare comes first"
        attempt: RolloutRequest = unpacked(packed_attempt)
        episode: Episode = await self._runner.episode(attempt)
        try:
            return packed(episode, "the episode", OF_DATA)
        except ConfigError as error:
            return packed(failed_episode(replace(attempt, trajectories=[]), AgentError(str(error))), "", OF_DATA)

    async def close(self) -> None:
        """Close the rollout."""
        self._stack.close()


@dataclass(eq=False, kw_only=True)
class _Place:
    """Process on a node."""

    node: ClusterNode
    actor: Any
    under_way: int = 0
    is_kept_free: bool = False
    """True if it accepts no more attempts, so that one can run in it alone."""


class _LostError(Exception):
    """A process that ran a rollout has died."""


class RayActors:
    """Processes as a `Rollout`: each attempt goes to the one that runs the fewest."""

    def __init__(self, orders: Orders, spread: RayConfig, *, silence_s: float) -> None:
        """Start nothing yet; a process that does not answer for `silence_s` seconds counts as hung."""
        self._orders, self._spread, self._silence_s = orders, spread, silence_s
        self._sent_orders: Any = None
        self._places: list[_Place] = []
        self._preparing: list[_Place] = []
        self._choosing = threading.Lock()
        self._concurrency = self._most_on_a_node = 1
        self._closing = threading.Event()

    @property
    def capacity(self) -> int:
        """Number of attempts that all processes together may run at a time."""
        return len(self._places) * self._concurrency

    def start(self, max_concurrent: int) -> None:
        """Start the processes, spread evenly; if one cannot be started, raise a `ConfigError` that names its node."""
        nodes = _with_cpus(alive_nodes())
        number = self._spread.num_actors or len(nodes)
        self._most_on_a_node = math.ceil(number / len(nodes))
        self._concurrency = self._spread.concurrency or math.ceil(max_concurrent / number)
        self._sent_orders = load_ray().put(self._orders)  # once for all processes: they may hold folders
        self._closing.clear()
        begun = [self._begin(nodes[index % len(nodes)]) for index in range(number)]
        self._places = [place for place, _ in begun]
        try:
            for place, prepared in begun:
                self._await_prepared(place, prepared)
        except BaseException:
            self.close()
            raise

    def _begin(self, node: ClusterNode) -> tuple[_Place, Any]:
        """Start a process, and return it with the future of its preparation."""
        options = on_node(
            node, num_cpus=self._spread.cpus_per_actor, max_concurrency=self._concurrency + SPARE_CALLS, max_restarts=0
        )
        actor = load_ray().remote(RolloutActor).options(**options).remote()
        return _Place(node=node, actor=actor), actor.prepare.remote(self._sent_orders)

    def _await_prepared(self, place: _Place, prepared: object) -> None:
        ray = load_ray()
        where = f"node {place.node.address}"
        try:
            ray.get(prepared, timeout=self._spread.start_timeout_s)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnschedulableError) as error:
            raise ConfigError(
                f"{where} has no room for a process that runs rollouts, or did not start it within "
                f"{self._spread.start_timeout_s:g} s: it has {place.node.num_cpus:g} CPUs; lower ray.cpus_per_actor or "
                "ray.num_actors, and see `ray status`"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = _cause_of(error)
            if isinstance(cause, ConfigError):
                raise ConfigError(f"{where} cannot run rollouts: {cause}") from error
            raise ConfigError(
                f"{where} cannot run rollouts: {type(cause).__name__}: {cause}: see that what the agent imports is "
                "installed there or lies in ray.working_dir, and that the node reaches the machine of the trainer"
            ) from error
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"{where} cannot run rllm ({first_line(error)}): install there what is installed here, or start "
                "again if the node has left the cluster"
            ) from error

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """Return the episode of an attempt from any process.

        Raises:
            AgentError: if it cannot be pickled, or several processes died while they ran it.
            RolloutTimeout: if a process did not answer for too long, and was ended.
            WorkerError: if no process is left.
        """
        nodes: list[str] = []
        while len(nodes) < MAX_LOSSES:
            alone = len(nodes) == MAX_LOSSES - 1
            place = await self._take(alone=alone)
            try:
                return await self._asked(place, attempt)
            except _LostError as lost:
                nodes.append(place.node.address)
                logger.warning(
                    "rollout %s:%d: its process on node %s died (%s); running it elsewhere",
                    *(attempt.task_id, attempt.index, place.node.address, lost),
                )
                self._replace(place)
                attempt = replace(attempt, session_id=new_session_id(), trajectories=[])
            finally:
                place.under_way -= 1
                if alone:
                    place.is_kept_free = False
        raise AgentError(
            f"rollout {attempt.task_id}:{attempt.index}: {MAX_LOSSES} processes died while they ran it, on the nodes "
            f"{', '.join(nodes)}: see their logs in Ray's folder (worker-*.err); the agent may take all memory or "
            "crash the interpreter"
        )

    async def _take(self, *, alone: bool) -> _Place:
        """Return a process with a free slot, taken; `alone` waits for an idle process and keeps others out."""
        room = 1 if alone else self._concurrency
        deadline = time.monotonic() + GONE_S
        kept: _Place | None = None
        try:
            while not (free := [place for place in self._open_to(kept) if place.under_way < room]):
                if self._places:
                    deadline = time.monotonic() + GONE_S
                elif time.monotonic() > deadline:
                    raise WorkerError(
                        "all rollout processes have ended, and no node has accepted a new one for "
                        f"{GONE_S:g} s: see `ray status`"
                    )
                if alone and kept not in self._places:
                    kept = self._kept_free()
                await asyncio.sleep(POLL_S)
        except BaseException:
            if kept is not None:
                kept.is_kept_free = False
            raise
        place = min(free, key=lambda place: place.under_way)
        place.under_way, place.is_kept_free = place.under_way + 1, alone
        return place

    def _kept_free(self) -> _Place | None:
        """Return the least busy process, which accepts no more attempts."""
        place = min(self._open_to(None), key=lambda place: place.under_way, default=None)
        if place is not None:
            place.is_kept_free = True
        return place

    def _open_to(self, kept: _Place | None) -> list[_Place]:
        """Return the processes that accept attempts, or only the one that is kept free."""
        return [place for place in self._places if place is kept or (kept is None and not place.is_kept_free)]

    async def _asked(self, place: _Place, attempt: RolloutRequest) -> Episode:
        """Return a process's episode of an attempt; its errors end the run, and are raised here unchanged."""
        ray = load_ray()
        try:
            sent = packed(attempt, "the task", OF_DATA)
        except ConfigError as error:
            raise AgentError(str(error)) from error
        answer = place.actor.episode.remote(sent)
        try:
            async with asyncio.timeout(self._silence_s):
                received: bytes = await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayTaskError as error:
            cause = _cause_of(error)
            raise (cause if isinstance(cause, RLLMError) else error) from error
        except TimeoutError as error:
            self._replace(place)
            raise RolloutTimeout(
                f"the process on node {place.node.address} was silent for {self._silence_s:.0f} s and was "
                "stopped: an async agent makes a blocking call; make it sync, or await asyncio.to_thread(...)"
            ) from error
        except ray.exceptions.RayError as error:
            raise _LostError(first_line(error)) from error
        episode: Episode = unpacked(received)
        return episode

    def _replace(self, place: _Place) -> None:
        """Replace a lost process; only the first caller does."""
        if place not in self._places:
            return
        self._places.remove(place)
        load_ray().kill(place.actor)  # an unreachable process must not continue what now runs elsewhere
        threading.Thread(target=self._bring_back, name="rllm replace rollout process", daemon=True).start()

    def _bring_back(self) -> None:
        while not self._closing.wait(REPLACE_EVERY_S):
            try:
                if self._has_begun_another():
                    return
            except Exception:  # Ray raises many errors while nodes come and go
                logger.warning("no process for rollouts could be started; retrying", exc_info=True)

    def _has_begun_another(self) -> bool:
        """Start a process on a node with room, and wait until it is ready."""
        with self._choosing:
            if self._closing.is_set():
                return False
            # The node with the fewest of our processes, unless it is full.
            held = Counter(place.node.id for place in (*self._places, *self._preparing))
            node = min(_with_cpus(alive_nodes()), key=lambda node: held[node.id], default=None)
            if node is None or held[node.id] >= self._most_on_a_node:
                return False
            place, prepared = self._begin(node)
            self._preparing.append(place)
        ready = False
        try:
            self._await_prepared(place, prepared)
            ready = True
        except ConfigError as error:
            logger.warning("node %s gets no rollouts for now: %s", node.address, error)
        finally:
            with self._choosing:
                self._preparing.remove(place)
                if ready and not self._closing.is_set():
                    self._places.append(place)
                else:
                    _end(place)
        if ready:
            logger.warning("node %s runs rollouts in place of the lost process", node.address)
        return ready

    def close(self) -> None:
        """End the processes, and let their rollouts clean up. Idempotent."""
        ray = load_ray()
        self._closing.set()
        with self._choosing:
            places, self._places = self._places, []
            self._sent_orders = None  # else the cluster keeps them, folders included
            for place in self._preparing:
                _end(place)
        if not ray.is_initialized():
            return
        ended = [place.actor.close.remote() for place in places]
        if ended:
            ray.wait(ended, num_returns=len(ended), timeout=CLOSE_S)
        for place in places:
            _end(place)


def _end(place: _Place) -> None:
    """End a process, unless Ray has ended with all of them."""
    ray = load_ray()
    if ray.is_initialized():
        ray.kill(place.actor)


def _with_cpus(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return nodes with CPUs; a cluster's head often has none, so that nothing runs on it."""
    return [node for node in nodes if node.num_cpus] or list(nodes)


def _cause_of(error: Any) -> BaseException:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


STUCK_MARGIN_S = 60.0
"""Seconds that a process may take for a rollout beyond the rollout's own limits."""


class RayRolloutRunner(RolloutRunner):
    """Runs attempts on the nodes of the cluster that Ray is connected to; see `RolloutRunner`.

    with joined("auto"), RayRolloutRunner(opening, max_concurrent=512) as runner:
        episodes = await runner.run(attempts)
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[Any]],
        *,
        spread: RayConfig | None = None,
        gateway: RemoteGateway | None = None,
        environment: Mapping[str, str] | None = None,
        paths: ImportPaths | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        num_retries: int = 1,
        retry_delay_s: float = 1.0,
        retry_if: Callable[[RolloutError], bool] | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        """Check the settings; nothing is started before `with`.

        Args:
            opening: called once in each process to create its rollout, which works inside `with`; sent by import path,
                or by its code if it is from a script.
            spread: number and placement of processes.
            gateway: gateway that each process must reach.
            environment: variables set in each process before it imports users' modules.
            paths: import paths; by default this process's.
            max_concurrent: rollouts running at a time, on all nodes together.
            timeout_s: see `RolloutRunner`; retries happen in the same process.
            num_retries: see `RolloutRunner`.
            retry_delay_s: see `RolloutRunner`.
            retry_if: see `RolloutRunner`.
            scoring: see `RolloutRunner`; it is done in this process.

        Raises:
            ConfigError: if a number is out of range, or `opening` cannot be pickled.
        """
        tries = {
            "timeout_s": timeout_s,
            "num_retries": num_retries,
            "retry_delay_s": retry_delay_s,
            "retry_if": retry_if,
        }
        orders = Orders(
            opening=packed(opening, "the agent", OF_CODE),
            runner=tries,
            paths=paths or ImportPaths.of(),
            environment=dict(environment or {}),
            gateway=gateway,
        )
        delays = retry_delay_s * (2**num_retries - 1)
        silence_s = (num_retries + 1) * (timeout_s + CANCEL_GRACE_S) + delays + STUCK_MARGIN_S
        self._actors = RayActors(orders, spread or RayConfig(), silence_s=silence_s)
        # Each process applies deadlines and retries; here only lost processes are handled.
        settings = {**tries, "timeout_s": (MAX_LOSSES + 1) * silence_s + GONE_S, "num_retries": 0}
        super().__init__(self._actors, max_concurrent=max_concurrent, scoring=scoring, **settings)

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            ConfigError: if one cannot be started, import the agent, or reach the gateway; the message names its node.
        """
        self._actors.start(self.max_concurrent)
        self.max_concurrent = min(self.max_concurrent, self._actors.capacity)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._actors.close()
