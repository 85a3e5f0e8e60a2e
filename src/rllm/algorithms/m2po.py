"""M2PO: a mask that bounds the second moment of a minibatch's log-ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import probability_ratio


@dataclass(frozen=True, kw_only=True)
class M2PO(GRPO):
    """Second-moment trust policy optimization (Zheng et al. 2025, arXiv:2510.01161), for samples of much older weights.

    Before each update, the tokens that have moved most from their sampler in the direction of their advantage lose
    their gradient, until the mean squared log-ratio of the others that moved so is at most `threshold` (eq. 4 and
    algorithm 1). No other token is clipped (eq. 5); masked tokens stay in the loss's mean.
    """

    masks_minibatches: ClassVar[bool] = True
    of_sampler: ClassVar[bool] = True

    threshold: float = 0.04
    """Bound on the mean squared log-ratio of a minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse("m2po masks by algorithm.threshold; leave it out", "clip_low", "clip_high", "dual_clip")
        self._require("threshold", self.threshold > 0, "use a number above 0, such as 0.04")

    def masked(self, batch: Batch, logprobs: Tensor) -> tuple[Batch, Sums]:
        assert batch.sampler_logprobs is not None, "ratios are taken of what was sampled"
        moves = logprobs - batch.sampler_logprobs
        (places,) = (moves * batch.advantages > 0).nonzero(as_tuple=True)
        moments, order = moves[places].square().sort()
        means = moments.cumsum(0) / torch.arange(1, len(moments) + 1)  # of the smallest, of the two smallest, ...
        left_out = places[order[means > self.threshold]]
        advantages = batch.advantages.index_fill(0, left_out, 0.0)
        return replace(batch, advantages=advantages), {"policy/clip_fraction": torch.tensor(float(len(left_out)))}

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        ratio = probability_ratio(logprobs, old_logprobs)
        return -batch.advantages * ratio, {"policy/ratio": ratio.detach().sum()}
