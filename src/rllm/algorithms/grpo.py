"""Group relative policy optimisation (Shao et al. 2024, DeepSeekMath): siblings are each other's baseline."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, pstdev
from typing import ClassVar

from rllm.algorithms.base import Algorithm
from rllm.types import TrajectoryGroup

EPSILON = 1e-6
"""Keeps groups of nearly equal rewards from dividing by zero."""


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Group relative policy optimisation: rewards less the group's mean, in standard deviations of the group.

    The deviation is that of the group itself; verl and TRL use that of a sample, larger by the root of n / (n - 1). The
    loss is a mean over tokens, as in verl; the paper's is aggregation=seq-mean-token-mean.
    """

    min_group_size: ClassVar[int] = 2

    normalize_std: bool = True
    """False gives Dr. GRPO's mean-only baseline (Liu et al. 2025)."""

    def credit(self, group: TrajectoryGroup) -> list[float]:
        rewards = group.rewards
        middle = mean(rewards)  # exact, so that equal rewards give zeros and not rounding errors
        scale = pstdev(rewards) + EPSILON if self.normalize_std else 1.0
        return [(reward - middle) / scale for reward in rewards]

    def baseline(self, group: TrajectoryGroup) -> float | None:
        return mean(group.rewards)
