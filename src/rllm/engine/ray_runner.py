"""The runner of rollouts over many machines: as `RolloutRunner`, with the rollouts in processes that Ray keeps on its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from rllm.engine.ray_actor import Orders
from rllm.engine.ray_actors import GONE_S, MAX_LOSSES, Opening, RayActors, Spread
from rllm.engine.remote_gateway import RemoteGateway
from rllm.engine.runner import CANCEL_GRACE_S, RolloutRunner
from rllm.engine.shipping import OF_CODE, ImportPaths, packed
from rllm.errors import RolloutError

STUCK_MARGIN_S = 60.0
"""How long a process may be silent about a rollout, beyond the time that the rollout itself may take."""


class RayRolloutRunner(RolloutRunner):
    """Turns attempts into episodes, as `RolloutRunner` does, on the nodes of the cluster that Ray is connected to.

    with joined("auto"), RayRolloutRunner(opening, max_concurrent=512) as runner:
        episodes = await runner.run(attempts)
    """

    def __init__(
        self,
        opening: Opening,
        *,
        spread: Spread | None = None,
        gateway: RemoteGateway | None = None,
        environment: Mapping[str, str] | None = None,
        paths: ImportPaths | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        num_retries: int = 1,
        retry_delay_s: float = 1.0,
        retry_if: Callable[[RolloutError], bool] | None = None,
    ) -> None:
        """Nothing is started before `with`.

        Args:
            opening: what each process calls to have its rollouts. It is sent by its import path, or from a script by its code.
            spread: how many processes, and where.
            gateway: which each of them must reach.
            environment: variables that each of them has before it imports anything of the user's.
            paths: where modules are found; by default as here.
            max_concurrent: rollouts under way at a time, on all nodes together.
            timeout_s: as for `RolloutRunner`; retries happen in the same process.
            num_retries: likewise.
            retry_delay_s: likewise.
            retry_if: likewise.

        Raises:
            ConfigError: if a number is out of range, or `opening` cannot be sent.
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
        self._actors = RayActors(orders, spread or Spread(), silence_s=silence_s)
        # Each process keeps the deadlines and retries; this one only sees to it that some process does.
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
