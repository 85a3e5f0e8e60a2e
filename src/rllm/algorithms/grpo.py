"""GRPO and its descendants Dr. GRPO, DAPO, GSPO and CISPO: siblings are each other's baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, pstdev

from torch import Tensor

from rllm.algorithms.base import ComparedRollouts, Sums
from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.losses import mean_by_sequence, probability_ratio
from rllm.types import TrajectoryGroup

EPSILON = 1e-6
"""Keeps groups of nearly equal rewards from dividing by zero."""


@dataclass(frozen=True, kw_only=True)
class GRPO(ComparedRollouts):
    """Group relative policy optimization: rewards less the group's mean, in standard deviations of the group.

    Shao et al. 2024 (DeepSeekMath). The deviation is the group's population deviation; verl and TRL use the sample
    deviation, larger by the root of n / (n - 1). The loss is a mean over tokens, as in verl; the paper's is
    aggregation=seq-mean-token-mean.
    """

    normalize_std: bool = True
    """False gives Dr. GRPO's mean-only baseline (Liu et al. 2025)."""

    def credit(self, group: TrajectoryGroup) -> list[float]:
        rewards = group.rewards
        middle = mean(rewards)  # exact, so that equal rewards give zeros and not rounding errors
        scale = pstdev(rewards) + EPSILON if self.normalize_std else 1.0
        return [(reward - middle) / scale for reward in rewards]


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Dr. GRPO (Liu et al. 2025): advantages are not divided by their deviation, nor losses by the answer's length."""

    normalize_std: bool = False
    aggregation: Aggregation = "fixed-length"


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """DAPO (Yu et al. 2025): clip less above than below, and take up to 1 off the reward near the length limit.

    Its other part, resampling tasks whose rewards are all alike, is a setting of rollouts.
    """

    clip_high: float = 0.28
    overlong_length: int | None = None
    """Tokens of a trajectory from which 1 is subtracted from its reward, such as rollout.max_tokens; None subtracts
    nothing."""
    overlong_buffer: int | None = None
    """Over how many tokens before that the penalty rises from 0, such as a fifth of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("clip_high", self.clip_high >= self.clip_low, "use at least algorithm.clip_low")
        self._require(
            "overlong_buffer",
            (self.overlong_buffer is None) is (self.overlong_length is None),
            "set it together with algorithm.overlong_length, or leave out both",
        )
        if self.overlong_length is not None and self.overlong_buffer is not None:
            self._require(
                "overlong_buffer",
                0 < self.overlong_buffer <= self.overlong_length,
                f"use a number of tokens from 1 to algorithm.overlong_length={self.overlong_length}",
            )

    def credit(self, group: TrajectoryGroup) -> list[float]:
        return super().credit(self._shaped(group))

    def baseline(self, group: TrajectoryGroup) -> float:
        return super().baseline(self._shaped(group))

    def _shaped(self, group: TrajectoryGroup) -> TrajectoryGroup:
        penalties = group.penalties or [0.0] * len(group.trajectories)
        overlong = [self.overlong_penalty(length) for length in group.lengths]
        return replace(group, penalties=[one + other for one, other in zip(penalties, overlong, strict=True)])

    def overlong_penalty(self, length: int) -> float:
        """Return the penalty, 0 to 1, of a trajectory that reaches into the buffer (eq. 13, negated)."""
        if self.overlong_length is None or self.overlong_buffer is None:
            return 0.0
        return min(max(1 - (self.overlong_length - length) / self.overlong_buffer, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GSPO (Zheng et al. 2025): the ratio is the geometric mean over the sequence, which varies little."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("dual_clip", self.dual_clip is None, "gspo has no such bound; leave it out")

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        # The value is the sequence's ratio, the gradient each token's own (GSPO-token, eq. 14), so that the tokens of a
        # sequence may differ in advantage; where they do not, it is the gradient of the sequence's ratio.
        shift = mean_by_sequence((logprobs - old_logprobs).detach(), batch.sequence_of)
        return super().surrogate(logprobs - logprobs.detach() + shift, shift.new_zeros(()), batch)


@dataclass(frozen=True, kw_only=True)
class CISPO(GRPO):
    """CISPO (MiniMax 2025, MiniMax-M1): the ratio is bounded as a weight, so that no token loses its gradient."""

    clip_low: float = 1.0
    """Distance below 1 that the weight may fall; 1 sets no bound, as in the paper."""
    clip_high: float = 4.0
    """Distance above 1 that it may rise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "dual_clip", self.dual_clip is None, "cispo bounds all weights by algorithm.clip_high; leave it out"
        )

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        ratio = probability_ratio(logprobs, old_logprobs).detach()
        weights = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        sums = {"policy/clip_fraction": (weights != ratio).float().sum(), "policy/ratio": ratio.sum()}
        return -weights * batch.advantages * logprobs, sums
