"""DPPO: a trust region of divergence instead of the probability ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import probability_ratio


@dataclass(frozen=True, kw_only=True)
class DPPO(GRPO):
    """Divergence proximal policy optimization (Qi et al. 2026, arXiv:2602.04879), with the binary approximations.

    A token loses its gradient if it moves further in the direction of its advantage, and the divergence between the
    sampler's distribution and the policy's, over "this token" and "any other", is above a bound. The ratio is a poor
    measure of that: a rare token may triple without effect, and a likely one change the answer at a ratio of 0.9.
    """

    of_sampler: ClassVar[bool] = True

    divergence: Literal["tv", "kl"] = "tv"
    """Measure of distance: tv is the difference of the token's two probabilities, kl the binary KL divergence."""
    clip_low: float = 0.15
    """Bound on the divergence of tokens that become less likely; 0.05 is usual for kl."""
    clip_high: float = 0.15
    """Bound on the divergence of tokens that become likelier."""
    ratio_cap: float = 20.0
    """Bound of the ratio, as a weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse("dppo bounds ratios by algorithm.ratio_cap; leave it out", "dual_clip")
        self._require("ratio_cap", self.ratio_cap >= 1, "use at least 1, such as 20")

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        now, rises = logprobs.detach(), batch.advantages > 0
        ratio = probability_ratio(now, old_logprobs)
        distance = binary_divergence(old_logprobs, now, self.divergence)
        is_outside = torch.where(
            rises,
            (now > old_logprobs) & (distance > self.clip_high),
            (now < old_logprobs) & (distance > self.clip_low),
        )
        sums = {"policy/clip_fraction": is_outside.float().sum(), "policy/ratio": ratio.sum()}
        return -batch.advantages * ratio.clamp(max=self.ratio_cap) * ~is_outside * logprobs, sums


def binary_divergence(old_logprobs: Tensor, logprobs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return [N] the divergence between two distributions over "the token" and "any other token", in nats for kl."""
    old, new = old_logprobs.exp(), logprobs.exp()
    if kind == "tv":
        return (new - old).abs()
    others = ((1.0 - old + 1e-8) / (1.0 - new + 1e-8)).log()
    return old * (old_logprobs - logprobs) + (1.0 - old) * others
