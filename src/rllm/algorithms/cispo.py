"""CISPO (MiniMax 2025, MiniMax-M1): the ratio is bounded as a weight, so that no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import probability_ratio


@dataclass(frozen=True, kw_only=True)
class CISPO(GRPO):
    """GRPO that weighs the log-probability of each token by its bounded ratio."""

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
