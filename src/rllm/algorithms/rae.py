"""RAE: role-conditioned advantage estimation for self-play, with a running mean of each role's rewards as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rllm.algorithms.base import Algorithm
from rllm.types import JSONMapping, JSONObject, Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class RAE(Algorithm):
    """Role-conditioned advantage estimation (Liu et al. 2025, SPIRAL, arXiv:2506.24119, algorithm 1).

    In self-play the seats of a game differ: the first player may win more often, however it plays. So each role of each
    game has a baseline of its own, an exponential moving average `b` of its rewards `r`. Trajectory after trajectory,
    in the order of the batch, `b` becomes `decay * b + (1 - decay) * r`, and the advantage is `r - b`. A role is the
    name of a trajectory, a game its `info["game"]`. Baselines begin at 0 and are part of the checkpoint.
    """

    compares_rollouts: ClassVar[bool] = False

    decay: float = 0.95
    """Weight of the baseline before a trajectory, from 0 to below 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("decay", 0 <= self.decay < 1, "use a number from 0 to below 1, such as 0.95")
        self._require("level", self.level == "trajectory", "the baseline is a mean over whole games; use trajectory")

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Baseline of each `game/role`, which every batch changes."""
        return {}

    def credit(self, group: TrajectoryGroup) -> list[float]:
        """Return the advantages of a group, and let its rewards change the baselines."""
        advantages = []
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
            role = _role_of(trajectory)
            baseline = self.decay * self.baselines.get(role, 0.0) + (1 - self.decay) * reward
            self.baselines[role] = baseline
            advantages.append(reward - baseline)
        return advantages

    def baseline(self, group: TrajectoryGroup) -> float | None:
        """Return the role's baseline after the latest batch."""
        return self.baselines.get(_role_of(group.trajectories[0]))

    def state(self) -> JSONObject:
        return {"baselines": dict(self.baselines)}

    def restore(self, state: JSONMapping) -> None:
        self.baselines.clear()
        self.baselines.update(state.get("baselines", {}))


def _role_of(trajectory: Trajectory) -> str:
    return f"{trajectory.info.get('game', '')}/{trajectory.name}"
