"""On-policy optimisation with the optimal baseline (Hao et al. 2025): longer siblings weigh more in the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rllm.algorithms.base import Algorithm
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class OPO(Algorithm):
    """A trajectory's advantage is how far its reward lies above its group's mean weighted by length.

    That baseline gives the gradient the least variance, if its size grows with the number of tokens.
    """

    min_group_size: ClassVar[int] = 2

    def credit(self, group: TrajectoryGroup) -> list[float]:
        middle = self.baseline(group)
        return [reward - middle for reward in group.rewards]

    def baseline(self, group: TrajectoryGroup) -> float:
        rewards, lengths = group.rewards, group.lengths
        if not any(lengths):  # as in groups that are made by hand
            lengths = [1] * len(rewards)
        # From the first reward on, so that equal rewards give zeros and not rounding errors.
        first = rewards[0]
        weighted = sum(length * (reward - first) for reward, length in zip(rewards, lengths, strict=True))
        return first + weighted / sum(lengths)
