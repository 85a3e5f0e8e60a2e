"""Supervised fine-tuning: the likelihood of demonstrations, written or sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.types import TrajectoryGroup

_CLIP_AND_LEVEL = ("clip_low", "clip_high", "dual_clip", "level", "gamma")
_OTHER_MODELS = ("kl_coef", "kl_in", "kl_estimator", "teacher_coef", "observation_coef")
_CORRECTION = ("correction", "correction_level", "correction_cap", "correction_floor")
_OF_SAMPLES = (*_CLIP_AND_LEVEL, *_OTHER_MODELS, *_CORRECTION)
"""Shared options that only make sense for tokens that the policy sampled."""


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """Every demonstration is worth 1, so the loss is the negative log-likelihood of its tokens.

    Under aggregation=token-mean that is the mean cross-entropy in nats a token.
    """

    demonstrated: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._refuse("demonstrations are not sampled by the policy; leave it out", *_OF_SAMPLES)
        super().__post_init__()

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return [1.0] * len(group.trajectories)

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the negative log-likelihood [N] times the weight of each role; `policy/nll` is without the weight."""
        return -batch.advantages * logprobs, {"policy/nll": -logprobs.detach().sum()}
