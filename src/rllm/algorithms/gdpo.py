"""GDPO: each named part of the reward is normalized in its group before the parts are added up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import mean, pstdev

from rllm.algorithms.base import ComparedRollouts
from rllm.algorithms.grpo import EPSILON
from rllm.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class GDPO(ComparedRollouts):
    """Group reward-decoupled normalization policy optimization (Liu et al. 2026, arXiv:2601.05242).

    GRPO normalizes the sum of the rewards, so that sums of different parts become the same advantage, and a part of
    large deviation hides the others. Here each part is normalized in its group, the weighted sum of them is the
    advantage, and the advantages are divided by their deviation over the batch; their mean is 0 in every group. A
    reward without named parts is a single part. Deviations are population deviations, not sample deviations.
    """

    weights: dict[str, float] = field(default_factory=dict)
    """Factors on the named parts; reward.weights unless set. Parts that are not named have 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("kl_in", self.kl_in == "loss", "gdpo compares parts of the reward; use loss")
        self._require("level", self.level == "trajectory", "steps have no parts of the reward; use trajectory")

    def credits(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        sums = [self.credit(group) for group in groups]
        scale = pstdev(list(chain.from_iterable(sums)), 0.0) + EPSILON if sums else 1.0
        return [[value / scale for value in row] for row in sums]

    def credit(self, group: TrajectoryGroup) -> list[float]:
        """Return the weighted sum of the normalized parts of each trajectory, before the scale of the batch."""
        rewards = zip(group.trajectories, group.rewards, strict=True)
        parts = [path.reward_parts or {"reward": reward} for path, reward in rewards]
        totals = [0.0] * len(parts)
        for name in dict.fromkeys(chain.from_iterable(parts)):
            known = [item[name] for item in parts if name in item]
            middle, scale = mean(known), pstdev(known) + EPSILON
            for place, item in enumerate(parts):
                if name in item:
                    totals[place] += self.weights.get(name, 1.0) * (item[name] - middle) / scale
        return totals

    def compared(self, trajectory: Trajectory) -> Hashable:
        return trajectory.final_reward(), *sorted(trajectory.reward_parts.items())
