"""REINFORCE++ (Hu 2025): PPO without a critic; advantages are normalised over the whole batch, not a task's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.losses import KLEstimator, whitened
from rllm.algorithms.ppo import gae
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Algorithm):
    """A token's advantage is what its trajectory earned from it on, each token's divergence taken off, and whitened."""

    usual_kl_estimator: ClassVar[KLEstimator] = "k1"

    @property
    def credits_tokens(self) -> bool:
        return True

    def token_advantages(self, batch: Batch) -> tuple[Tensor, None]:
        assert batch.rewards is not None, "tokens are credited from their rewards"
        assert batch.trajectory_of is not None, "tokens are credited along their trajectory"
        no_values = torch.zeros_like(batch.rewards)
        returns = gae(batch.rewards, no_values, batch.trajectory_of, gamma=self.gamma, gae_lambda=1.0)
        return whitened(returns), None


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(Algorithm):
    """A trajectory's advantage is how far its reward lies above its group's mean, in deviations of the whole batch."""

    min_group_size: ClassVar[int] = 2
    usual_kl_estimator: ClassVar[KLEstimator] = "k2"

    def credits(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        distances: list[float] = []
        for group in groups:
            rewards = group.rewards
            middle = mean(rewards)
            distances += [reward - middle for reward in rewards]
        # A trajectory without tokens, as groups that are made by hand may have, counts as one of a single token.
        lengths = torch.tensor([max(length, 1) for group in groups for length in group.lengths], dtype=torch.long)
        by_token = whitened(torch.tensor(distances, dtype=torch.float64).repeat_interleave(lengths))
        first_tokens = lengths.cumsum(0) - lengths
        advantages = iter(by_token[first_tokens].tolist())
        return [[next(advantages) for _ in group.trajectories] for group in groups]

    def baseline(self, group: TrajectoryGroup) -> float | None:
        return mean(group.rewards)
