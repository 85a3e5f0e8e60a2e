"""`RayRolloutRunner`: a `RolloutRunner` whose rollouts run in processes on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from rllm.config.schema import RayConfig
from rllm.engine.capture import RemoteGateway
from rllm.engine.event_loop import CANCEL_GRACE_S
from rllm.engine.ray_actors import GONE_S, MAX_LOSSES, Opening, Orders, RayActors
from rllm.engine.ray_cluster import OF_CODE, ImportPaths, packed
from rllm.engine.runner import RolloutRunner
from rllm.errors import RolloutError

STUCK_MARGIN_S = 60.0
"""Seconds that a process may take for a rollout beyond the rollout's own limits."""


class RayRolloutRunner(RolloutRunner):
    """Runs attempts on the nodes of the cluster that Ray is connected to; see `RolloutRunner`.

    with joined("auto"), RayRolloutRunner(opening, max_concurrent=512) as runner:
        episodes = await runner.run(attempts)
    """

    def __init__(
        self,
        opening: Opening,
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
    ) -> None:
        """Check the settings; nothing is started before `with`.

        Args:
            opening: called once in each process to create its rollout; sent by import path, or by its code if it is
                from a script.
            spread: number and placement of processes.
            gateway: gateway that each process must reach.
            environment: variables set in each process before it imports users' modules.
            paths: import paths; by default those of this process.
            max_concurrent: rollouts running at a time, on all nodes together.
            timeout_s: see `RolloutRunner`; retries happen in the same process.
            num_retries: see `RolloutRunner`.
            retry_delay_s: see `RolloutRunner`.
            retry_if: see `RolloutRunner`.

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
        super().__init__(self._actors, max_concurrent=max_concurrent, **settings)

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            ConfigError: if one cannot be started, cannot import the agent, or cannot reach the gateway; with its node.
        """
        self._actors.start(self.max_concurrent)
        self.max_concurrent = min(self.max_concurrent, self._actors.capacity)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._actors.close()
