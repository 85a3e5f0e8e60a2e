"""Proximal policy optimization (Schulman et al. 2017) with a critic and generalized advantage estimation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.losses import whitened


@dataclass(frozen=True, kw_only=True)
class PPO(Algorithm):
    """PPO: a token's advantage is by how much rewards exceeded the critic's estimate, near rewards counting more."""

    needs_values: ClassVar[bool] = True

    gae_lambda: float = 0.95
    """Trust in rewards far ahead over the critic: 1 trusts rewards alone, 0 the critic alone."""
    whiten: bool = True
    """Bring the advantages of a batch to mean 0 and standard deviation 1."""
    value_clip: float | None = 0.2
    """Distance that a value may move from before the update until its gradient stops. None has no bound."""
    value_coef: float = 0.5
    """Weight of the critic's loss relative to the policy's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("gae_lambda", 0 <= self.gae_lambda <= 1, "use a number from 0 to 1, such as 0.95")
        self._require(
            "value_clip", self.value_clip is None or self.value_clip > 0, "use a number above 0, or null for no bound"
        )
        self._require("value_coef", 0 < self.value_coef < math.inf, "use a number above 0, such as 0.5")

    def token_advantages(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return advantages and returns [N] by generalized advantage estimation; each token is a decision."""
        assert batch.rewards is not None, "the batch of a critic has rewards"
        assert batch.values is not None, "the batch of a critic has values"
        assert batch.trajectory_of is not None, "tokens are credited along their trajectory"
        advantages = gae(batch.rewards, batch.values, batch.trajectory_of, gamma=self.gamma, gae_lambda=self.gae_lambda)
        return whitened(advantages) if self.whiten else advantages, advantages + batch.values

    def value_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return half the squared error of the value or the clipped value, whichever is larger, times `value_coef`."""
        assert batch.values is not None, "the batch of a critic has values"
        assert batch.returns is not None, "the batch of a critic has returns"
        errors = (values - batch.returns).square()
        clipped = errors
        if self.value_clip is not None:
            near = batch.values + (values - batch.values).clamp(-self.value_clip, self.value_clip)
            clipped = torch.maximum(errors, (near - batch.returns).square())
        sums = {
            "critic/error": errors.detach().sum(),
            "critic/clip_fraction": (clipped > errors).float().sum(),
            "critic/value": values.detach().sum(),
        }
        return 0.5 * self.value_coef * (clipped * batch.weights).sum(), sums


def returns_of(batch: Batch, gamma: float) -> Tensor:
    """Return [N] the discounted rewards from each token to the end of its trajectory."""
    assert batch.rewards is not None, "tokens are credited from their rewards"
    assert batch.trajectory_of is not None, "tokens are credited along their trajectory"
    return gae(batch.rewards, torch.zeros_like(batch.rewards), batch.trajectory_of, gamma=gamma, gae_lambda=1.0)


def gae(rewards: Tensor, values: Tensor, trajectory_of: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Return generalized advantage estimates [N] (Schulman et al. 2016, eq. 16); arguments are [N].

    The sum of how much each token and those after it surprised the critic, discounted by `gamma * gae_lambda` for each
    token between. Nothing follows the last token of a trajectory.
    """
    advantages: list[float] = []
    advantage = next_value = 0.0
    next_owner = None
    rows = zip(rewards.tolist(), values.tolist(), trajectory_of.tolist(), strict=True)
    for reward, value, owner in reversed(list(rows)):
        if owner != next_owner:
            advantage = next_value = 0.0
        surprise = reward + gamma * next_value - value
        advantage = surprise + gamma * gae_lambda * advantage
        advantages.append(advantage)
        next_value, next_owner = value, owner
    return torch.tensor(advantages[::-1], dtype=values.dtype)
