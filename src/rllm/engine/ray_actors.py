"""The processes that make rollouts on the nodes of a cluster, and what happens when one of them dies.

Each attempt is one call of one process. A process that dies, alone or with its node, loses the attempts that it had under
way; each of them is made again elsewhere, in a new session, so that it gives exactly one episode and none of the lost one's
tokens. One that has lost two processes is made alone in the third, so that what kills processes fails by itself. Another
process takes the lost one's place as soon as a node has room.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from rllm.engine.ray_actor import Orders, RolloutActor
from rllm.engine.ray_cluster import ClusterNode, alive_nodes, load_ray, on_node
from rllm.engine.runner import Attempt, new_session_id
from rllm.engine.shipping import OF_DATA, packed, unpacked
from rllm.errors import AgentError, ConfigError, RLLMError, RolloutTimeout, WorkerError, first_line
from rllm.types import Episode

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""How many processes may die under one attempt, before it is taken to be what kills them."""
GONE_S = 300.0
"""How long to wait for a process when none is left."""
CLOSE_S = 5.0
"""How long processes may take to end by themselves."""
POLL_S = 0.05
REPLACE_EVERY_S = 1.0
SPARE_CALLS = 16
"""Calls that a process answers beside its rollouts."""

Opening = Callable[[], AbstractContextManager[Any]]
"""Makes a `Rollout` that works inside `with`; called once in each process."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How many processes make rollouts, and where."""

    num_actors: int | None = None
    """`None` is one on each node that has a CPU."""
    concurrency: int | None = None
    """Rollouts under way in each at a time; `None` divides those of the runner evenly."""
    cpus_per_actor: float = 0.0
    """CPUs that Ray reserves for each. Rollouts mostly wait for the model, so by default none."""
    start_timeout_s: float = 300.0
    """How long one may take to be ready."""


@dataclass(eq=False, kw_only=True)
class _Place:
    """A process on a node."""

    node: ClusterNode
    actor: Any
    under_way: int = 0
    is_kept_free: bool = False
    """Whether it takes no more, so that an attempt can be alone in it."""


class _LostError(Exception):
    """The process that made a rollout is gone."""


class RayActors:
    """The processes as a `Rollout`: each attempt goes to the one that has the fewest under way."""

    def __init__(self, orders: Orders, spread: Spread, *, silence_s: float) -> None:
        """
        Args:
            orders: what each process is told first.
            spread: how many, and where.
            silence_s: how long one may take for an attempt before it is taken to hang.
        """
        self._orders, self._spread, self._silence_s = orders, spread, silence_s
        self._places: list[_Place] = []
        self._preparing: list[_Place] = []
        self._choosing = threading.Lock()
        self._concurrency = self._most_on_a_node = 1
        self._closing = threading.Event()

    @property
    def capacity(self) -> int:
        """How many attempts may be under way in all of them."""
        return len(self._places) * self._concurrency

    def start(self, max_concurrent: int) -> None:
        """Start them, spread evenly.

        Raises:
            ConfigError: if one cannot be started or prepared, with its node and the reason.
        """
        nodes = _with_cpus(alive_nodes())
        number = self._spread.num_actors or len(nodes)
        self._most_on_a_node = math.ceil(number / len(nodes))
        self._concurrency = self._spread.concurrency or math.ceil(max_concurrent / number)
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
        """A new process, and the promise that it is prepared."""
        options = on_node(
            node, num_cpus=self._spread.cpus_per_actor, max_concurrency=self._concurrency + SPARE_CALLS, max_restarts=0
        )
        actor = load_ray().remote(RolloutActor).options(**options).remote()
        return _Place(node=node, actor=actor), actor.prepare.remote(self._orders)

    def _await_prepared(self, place: _Place, prepared: Any) -> None:
        ray = load_ray()
        where = f"node {place.node.address}"
        try:
            ray.get(prepared, timeout=self._spread.start_timeout_s)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnschedulableError) as error:
            raise ConfigError(
                f"{where} has no room for a process that makes rollouts, or has not started it in {self._spread.start_timeout_s:g} s: "
                f"it has {place.node.num_cpus:g} CPUs; lower ray.cpus_per_actor or ray.num_actors, and see `ray status`"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = _cause_of(error)
            raise ConfigError(
                f"{where} cannot make rollouts: {type(cause).__name__}: {cause}: see that what the agent imports is installed "
                "there or lies in ray.working_dir, and that the node reaches the machine of the trainer"
            ) from error
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"{where} cannot run our code ({first_line(error)}): install there what is installed here"
            ) from error

    async def rollout(self, attempt: Attempt) -> Episode:
        """The episode of an attempt, from whichever process has made it.

        Raises:
            AgentError: if it cannot be sent, or if one process after another died of it.
            RolloutTimeout: if a process said nothing of it for too long, and was ended.
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
                    "rollout %s:%d: its process on node %s is gone (%s); it is made elsewhere",
                    *(attempt.task_id, attempt.index, place.node.address, lost),
                )
                self._replace(place)
                attempt = replace(attempt, session_id=new_session_id(), trajectories=[])
            finally:
                place.under_way -= 1
                if alone:
                    place.is_kept_free = False
        raise AgentError(
            f"rollout {attempt.task_id}:{attempt.index} took {MAX_LOSSES} processes with it, on the nodes {', '.join(nodes)}: see "
            "their logs in Ray's folder (worker-*.err); an agent that takes all memory or crashes the interpreter does that"
        )

    async def _take(self, *, alone: bool) -> _Place:
        """A process with room, and a place in it; `alone` waits for one that has nothing under way, and has it alone."""
        room = 1 if alone else self._concurrency
        deadline = time.monotonic() + GONE_S
        kept: _Place | None = None
        try:
            while not (free := [place for place in self._open_to(kept) if place.under_way < room]):
                if self._places:
                    deadline = time.monotonic() + GONE_S
                elif time.monotonic() > deadline:
                    raise WorkerError(
                        "all processes that make rollouts are gone, and no node has taken one for "
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
        """The process that has the fewest under way, and takes no more from now on."""
        place = min(self._open_to(None), key=lambda place: place.under_way, default=None)
        if place is not None:
            place.is_kept_free = True
        return place

    def _open_to(self, kept: _Place | None) -> list[_Place]:
        """The processes that take attempts: of somebody for whom one is kept free, that one."""
        return [place for place in self._places if place is kept or (kept is None and not place.is_kept_free)]

    async def _asked(self, place: _Place, attempt: Attempt) -> Episode:
        """What a process makes of an attempt; what it raises ends the run, and is raised here as it was there."""
        ray = load_ray()
        try:
            sent = packed(attempt, "the task", OF_DATA)
        except ConfigError as error:
            raise AgentError(str(error)) from error
        answer = place.actor.episode.remote(sent)
        try:
            received = await asyncio.wait_for(_awaited(answer), self._silence_s)
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayTaskError as error:
            cause = _cause_of(error)
            raise (cause if isinstance(cause, RLLMError) else error) from error
        except TimeoutError as error:
            self._replace(place)
            raise RolloutTimeout(
                f"the process on node {place.node.address} said nothing of it for {self._silence_s:.0f} s, and was ended: an async "
                "agent makes a blocking call; make it a sync function, or await asyncio.to_thread(...)"
            ) from error
        except ray.exceptions.RayError as error:
            raise _LostError(first_line(error)) from error
        episode: Episode = unpacked(received)
        return episode

    def _replace(self, place: _Place) -> None:
        """Another process for one that is gone; only the first who notices brings it about."""
        if place not in self._places:
            return
        self._places.remove(place)
        load_ray().kill(place.actor)  # one that is merely out of reach must not go on with what is now made elsewhere
        threading.Thread(target=self._bring_back, name="rllm replace rollout process", daemon=True).start()

    def _bring_back(self) -> None:
        while not self._closing.wait(REPLACE_EVERY_S):
            try:
                if self._has_begun_another():
                    return
            except Exception:  # whatever Ray raises while nodes come and go
                logger.warning("no process for rollouts could be started; it is tried again", exc_info=True)

    def _has_begun_another(self) -> bool:
        """Start a process where there is room, and wait until it is ready."""
        with self._choosing:
            node = self._node_with_room()
            if node is None:
                return False
            place, prepared = self._begin(node)
            self._preparing.append(place)
        ready = False
        try:
            self._await_prepared(place, prepared)
            ready = True
        except ConfigError as error:
            logger.warning("no rollouts on node %s for now: %s", node.address, error)
        finally:
            with self._choosing:
                self._preparing.remove(place)
                if ready and not self._closing.is_set():
                    self._places.append(place)
                else:
                    _end(place)
        if ready:
            logger.warning("node %s makes rollouts in the place of the process that is gone", node.address)
        return ready

    def _node_with_room(self) -> ClusterNode | None:
        """The node with the fewest of our processes, if that has not its share."""
        held = Counter(place.node.id for place in (*self._places, *self._preparing))
        node = min(_with_cpus(alive_nodes()), key=lambda node: held[node.id], default=None)
        return node if node is not None and held[node.id] < self._most_on_a_node else None

    def close(self) -> None:
        """End the processes, and let their rollouts close what they hold. Repeatable."""
        ray = load_ray()
        self._closing.set()
        if not ray.is_initialized():
            return
        with self._choosing:
            places, self._places = self._places, []
            for place in self._preparing:
                _end(place)
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


async def _awaited(answer: Any) -> bytes:
    received: bytes = await answer
    return received


def _with_cpus(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Nodes that are there for work; a cluster's head often has no CPUs, so that nothing is put on it."""
    return [node for node in nodes if node.num_cpus] or list(nodes)


def _cause_of(error: Any) -> BaseException:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
