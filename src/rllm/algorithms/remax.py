"""ReMax (Li et al. 2023): what greedy decoding earns on the same task is the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

from rllm.algorithms.base import Algorithm
from rllm.errors import ConfigError
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class ReMax(Algorithm):
    """A trajectory's advantage is how far its reward lies above that of the task's greedy rollout."""

    needs_greedy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "level", self.level == "trajectory", "a greedy rollout has other steps; use trajectory, or grpo for steps"
        )

    def credit(self, group: TrajectoryGroup) -> list[float]:
        baseline = self.baseline(group)
        return [reward - baseline for reward in group.rewards]

    def baseline(self, group: TrajectoryGroup) -> float:
        """Return the reward of the greedy rollout.

        Raises:
            ConfigError: if the group has no scored greedy rollout.
        """
        rewards = [reward for item in group.references if (reward := item.final_reward()) is not None]
        if not rewards:
            raise ConfigError(
                f"group {group.group_id!r} has no scored greedy rollout to compare with: add one to `references` "
                "(a trajectory with trainable=False), or use algorithm.name=rloo"
            )
        return mean(rewards)
