"""REINFORCE for single trajectories whose tasks do not come again, as in online learning."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from rllm.algorithms.base import Algorithm
from rllm.types import TrajectoryGroup

BASELINE_KEY = "rllm.baseline"
"""Key of a trajectory's `info`: mean reward of the trajectories before it."""


@dataclass(frozen=True, kw_only=True)
class Online(Algorithm):
    """REINFORCE (Williams 1992) with the mean reward of a group as baseline; for a single trajectory, a running mean.

    The running mean is that of the rewards before it, which the source of the trajectory has noted; without one, a
    single trajectory teaches nothing.
    """

    def credit(self, group: TrajectoryGroup) -> list[float]:
        baseline = self.baseline(group)
        return [reward - baseline for reward in group.rewards]

    def baseline(self, group: TrajectoryGroup) -> float:
        if len(group.rewards) > 1:
            return mean(group.rewards)
        [trajectory], [reward] = group.trajectories, group.rewards
        return float(trajectory.info.get(BASELINE_KEY, reward))
