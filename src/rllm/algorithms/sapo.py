"""SAPO: a soft gate on the probability ratio in place of a clip range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import probability_ratio


@dataclass(frozen=True, kw_only=True)
class SAPO(GRPO):
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347).

    A token's ratio r passes the gate `sigmoid(t (r - 1)) * 4 / t` (eq. 5). At r = 1 its gradient equals the plain
    ratio's; further away the gradient fades instead of ending. Bad tokens fade faster.
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
