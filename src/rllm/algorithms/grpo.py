"""GRPO and its descendants Dr. GRPO, DAPO, GSPO, CISPO, SAPO and GiGPO: siblings are each other's baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, pstdev

import torch
from torch import Tensor

from rllm.algorithms.base import ComparedRollouts, Sums
from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.losses import mean_by_sequence, probability_ratio
from rllm.types import TrajectoryGroup

EPSILON = 1e-6
"""Keeps groups of nearly equal rewards from dividing by zero."""


@dataclass(frozen=True, kw_only=True)
class GRPO(ComparedRollouts):
    """Group relative policy optimisation: rewards less the group's mean, in standard deviations of the group.

    Shao et al. 2024 (DeepSeekMath). The deviation is that of the group itself; verl and TRL use that of a sample,
    larger by the root of n / (n - 1). The loss is a mean over tokens, as in verl; the paper's is
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
        self._require("clip_high", self.clip_high >= self.clip_low, "use at least clip_low; dapo clips less above")
        self._require(
            "overlong_buffer",
            (self.overlong_buffer is None) is (self.overlong_length is None),
            "set it together with overlong_length, or neither",
        )
        if self.overlong_length is not None and self.overlong_buffer is not None:
            self._require(
                "overlong_buffer",
                0 < self.overlong_buffer <= self.overlong_length,
                f"use a number of tokens from 1 to overlong_length={self.overlong_length}",
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
        self._require("dual_clip", self.dual_clip is None, "cispo bounds all weights by clip_high; leave it out")

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        ratio = probability_ratio(logprobs, old_logprobs).detach()
        weights = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        sums = {"policy/clip_fraction": (weights != ratio).float().sum(), "policy/ratio": ratio.sum()}
        return -weights * batch.advantages * logprobs, sums


@dataclass(frozen=True, kw_only=True)
class GiGPO(GRPO):
    """Group-in-group policy optimisation (Feng et al. 2025, arXiv:2505.10978).

    The advantage of a step is that of its trajectory among the trajectories of the task, plus `step_coef` times that of
    its discounted return among all steps of the task whose observation was the same. So a step that made
    progress where siblings got stuck is rewarded, even in a trajectory that failed. A step whose observation no other
    step had keeps the advantage of its trajectory.
    """

    step_coef: float = 1.0
    gamma: float = 0.95

    def __post_init__(self) -> None:
        self._require("step_coef", self.step_coef > 0, "use a number above it, or algorithm.name=grpo")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class SAPO(GRPO):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347).

    A token's ratio r passes the gate `sigmoid(t (r - 1)) * 4 / t` (eq. 5). At r = 1 its gradient is that of the
    plain ratio; further away the gradient fades instead of ending. Bad tokens fade faster.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    positive_temperature: float = 1.0
    """Rate at which the gradient of tokens with a positive advantage fades as the ratio moves from 1."""
    negative_temperature: float = 1.05
    """The same for other tokens, whose gradients disturb many tokens at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse("sapo has a gate instead of a clip range; leave it out", "clip_low", "clip_high", "dual_clip")
        for name in ("positive_temperature", "negative_temperature"):
            self._require(name, getattr(self, name) > 0, "use a number above 0, such as 1")

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        ratio = probability_ratio(logprobs, old_logprobs)
        temperature = torch.where(batch.advantages > 0, self.positive_temperature, self.negative_temperature)
        gate = torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature
        return -batch.advantages * gate, {"policy/ratio": ratio.detach().sum()}
