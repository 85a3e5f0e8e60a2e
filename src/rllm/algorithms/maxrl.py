"""MaxRL: rewards to an approximation of maximum likelihood."""

from __future__ import annotations

from dataclasses import dataclass

from rllm.algorithms.base import ComparedRollouts
from rllm.errors import ConfigError
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class MaxRL(ComparedRollouts):
    """Maximum likelihood reinforcement learning (Tajwar et al. 2026): rewards over the group's mean, minus 1.

    arXiv:2602.02710. A task that is rarely solved counts more, as in the logarithm of the chance to solve it. For
    rewards of 0 and 1 in groups of n, the expected gradient is this logarithm's gradient, with its power series in the
    chance to fail cut off after n - 1 terms; n = 2 is plain policy gradient.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse("it can make rewards negative, by whose mean maxrl divides; use loss", "kl_in")

    def credit(self, group: TrajectoryGroup) -> list[float]:
        rewards = group.rewards
        if min(rewards) < 0:
            raise ConfigError(
                f"rewards {rewards} of group {group.group_id!r}: algorithm.name=maxrl divides by their mean; use "
                "rewards of 0 and above, such as 1 for a right answer, or algorithm.name=grpo"
            )
        middle = self.baseline(group)
        return [(reward - middle) / middle if middle else 0.0 for reward in rewards]
