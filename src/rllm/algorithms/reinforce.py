"""REINFORCE and its descendants REINFORCE++, RLOO, OPO, ReMax and Online, which differ in their baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm, ComparedRollouts
from rllm.algorithms.batch import Batch
from rllm.algorithms.losses import KLEstimator, whitened
from rllm.algorithms.ppo import returns_of
from rllm.errors import ConfigError
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class Reinforce(Algorithm):
    """REINFORCE (Williams 1992): a trajectory's advantage is its reward."""

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return group.rewards


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Algorithm):
    """REINFORCE++ (Hu 2025): PPO without a critic; each token's return is whitened over the batch."""

    usual_kl_estimator: ClassVar[KLEstimator] = "k1"

    @property
    def credits_tokens(self) -> bool:
        return True

    def token_advantages(self, batch: Batch) -> tuple[Tensor, None]:
        return whitened(returns_of(batch, self.gamma)), None


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(ComparedRollouts):
    """REINFORCE++ with a baseline: rewards less the group's mean, in standard deviations of the whole batch."""

    usual_kl_estimator: ClassVar[KLEstimator] = "k2"

    def credits(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        distances = [distance for group in groups for distance in self.credit(group)]
        # A trajectory without tokens, as groups that are made by hand may have, counts as one of a single token.
        lengths = torch.tensor([max(length, 1) for group in groups for length in group.lengths], dtype=torch.long)
        by_token = whitened(torch.tensor(distances, dtype=torch.float64).repeat_interleave(lengths))
        first_tokens = lengths.cumsum(0) - lengths
        advantages = iter(by_token[first_tokens].tolist())
        return [[next(advantages) for _ in group.trajectories] for group in groups]


@dataclass(frozen=True, kw_only=True)
class RLOO(ComparedRollouts):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024): reward less the siblings' mean."""

    def credit(self, group: TrajectoryGroup) -> list[float]:
        number = len(group.rewards)
        # r - mean(others) = (r - mean(all)) * n / (n - 1)
        return [distance * number / (number - 1) for distance in super().credit(group)]


@dataclass(frozen=True, kw_only=True)
class OPO(ComparedRollouts):
    """On-policy optimization with the optimal baseline (Hao et al. 2025): reward less the group's mean by length.

    That baseline gives the gradient the least variance, if its size grows with the number of tokens.
    """

    def baseline(self, group: TrajectoryGroup) -> float:
        rewards, lengths = group.rewards, group.lengths
        if not any(lengths):  # as in groups that are made by hand
            lengths = [1] * len(rewards)
        # From the first reward on, so that equal rewards give zeros and not rounding errors.
        first = rewards[0]
        weighted = sum(length * (reward - first) for reward, length in zip(rewards, lengths, strict=True))
        return first + weighted / sum(lengths)


@dataclass(frozen=True, kw_only=True)
class ReMax(ComparedRollouts):
    """ReMax (Li et al. 2023): reward less the reward of the task's greedy rollout."""

    min_group_size: ClassVar[int] = 1
    needs_greedy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "level",
            self.level == "trajectory",
            "a greedy rollout has other steps; use trajectory, or algorithm.name=grpo",
        )

    def baseline(self, group: TrajectoryGroup) -> float:
        """Return the reward of the greedy rollout; raise `ConfigError` if the group has no scored greedy rollout."""
        rewards = [reward for item in group.references if (reward := item.final_reward()) is not None]
        if not rewards:
            raise ConfigError(
                f"group {group.group_id!r} has no scored greedy rollout to compare with: add one to `references` "
                "(a trajectory with trainable=False), or use algorithm.name=rloo"
            )
        return mean(rewards)


BASELINE_KEY = "rllm.baseline"
"""Key of a trajectory's `info`: mean reward of the trajectories before it."""


@dataclass(frozen=True, kw_only=True)
class Online(ComparedRollouts):
    """REINFORCE (Williams 1992) with the mean reward of a group as baseline; for a single trajectory, a running mean.

    The running mean is taken over the earlier rewards and recorded by the trajectory's source; without one, a single
    trajectory teaches nothing.
    """

    min_group_size: ClassVar[int] = 1

    def baseline(self, group: TrajectoryGroup) -> float:
        if len(group.rewards) > 1:
            return mean(group.rewards)
        [trajectory], [reward] = group.trajectories, group.rewards
        return float(trajectory.info.get(BASELINE_KEY, reward))
