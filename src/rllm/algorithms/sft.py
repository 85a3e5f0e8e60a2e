"""Supervised fine-tuning: the likelihood of demonstrations, written or sampled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.types import TrajectoryGroup

_OF_SAMPLES = {
    "clip_low": "there is no probability ratio to clip",
    "clip_high": "there is no probability ratio to clip",
    "dual_clip": "there is no probability ratio to clip",
    "level": "demonstrations are not compared with each other",
    "gamma": "demonstrations are not compared with each other",
    "kl_coef": "a divergence is estimated from tokens that the policy sampled",
    "kl_in": "a divergence is estimated from tokens that the policy sampled",
    "kl_estimator": "a divergence is estimated from tokens that the policy sampled",
    "teacher_coef": "a teacher judges tokens that the policy sampled",
    "correction": "there is no sampler to correct for",
    "correction_level": "there is no sampler to correct for",
    "correction_cap": "there is no sampler to correct for",
}
"""Shared options that mean nothing for demonstrations, and why."""


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """Every demonstration is worth 1, so the loss is the negative log-likelihood of its tokens.

    Under aggregation=token-mean that is the mean cross-entropy in nats a token.
    """

    demonstrated: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        defaults = {item.name: item.default for item in fields(self)}
        for name, why in _OF_SAMPLES.items():
            self._require(name, getattr(self, name) == defaults[name], f"{why}; leave it out")
        super().__post_init__()

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return [1.0] * len(group.trajectories)

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the negative log-likelihood [N] times the weight of each role; `policy/nll` is without the weight."""
        return -batch.advantages * logprobs, {"policy/nll": -logprobs.detach().sum()}
