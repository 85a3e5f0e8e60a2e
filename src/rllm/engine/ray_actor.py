"""What runs on a node: one process that makes many rollouts at a time, by the runner that a single machine has.

Episodes leave it as bytes, because what users put into one may not be fit to travel; that is then the failure of this one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rllm.engine.remote_gateway import RemoteGateway
from rllm.engine.runner import Attempt, RolloutRunner, failed_episode
from rllm.engine.shipping import OF_DATA, ImportPaths, packed, unpacked
from rllm.engine.watchdog import watched_loop
from rllm.errors import AgentError, ConfigError
from rllm.sdk.variables import beside_own_keys
from rllm.types import Episode


@dataclass(frozen=True, kw_only=True)
class Orders:
    """All that a process needs in order to make rollouts."""

    opening: bytes
    """A function that gives a context manager of a `Rollout`, as `shipping.packed`."""
    runner: Mapping[str, Any]
    """The settings of a `RolloutRunner`."""
    paths: ImportPaths
    environment: Mapping[str, str]
    """Variables that are set before any of the user's modules is imported; keys that the node has stay."""
    gateway: RemoteGateway | None = None
    """What must be reached from here, if anything."""


class RolloutActor:
    """An actor of Ray, whose methods share an event loop."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._runner: RolloutRunner | None = None

    async def prepare(self, orders: Orders) -> None:
        """Get ready for `episode`.

        Raises:
            InferenceError: if the gateway cannot be reached from here.
            Exception: whatever importing the user's code raises.
        """
        if orders.gateway is not None:
            orders.gateway.check()
        os.environ.update(beside_own_keys(orders.environment, os.environ))
        orders.paths.apply()
        rollout: AbstractContextManager[Any] = unpacked(orders.opening)()
        self._runner = RolloutRunner(self._stack.enter_context(rollout), **orders.runner)
        self._stack.enter_context(watched_loop())

    async def episode(self, packed_attempt: bytes) -> bytes:
        """The episode of an attempt, a failed one too. Raises what must end the run."""
        assert self._runner is not None, "prepare comes first"
        attempt: Attempt = unpacked(packed_attempt)
        episode: Episode = await self._runner.episode(attempt)
        try:
            return packed(episode, "what the rollout gave", OF_DATA)
        except ConfigError as error:
            return packed(failed_episode(replace(attempt, trajectories=[]), AgentError(str(error))), "", OF_DATA)

    async def close(self) -> None:
        """Let the rollouts' own things end."""
        self._stack.close()
