"""Group sequence policy optimisation (Zheng et al. 2025): ratios of whole sequences are weighted and clipped."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import clipped_policy_loss, mean_by_sequence


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO whose ratio is the geometric mean over the sequence; it varies little, so clip ranges are small."""

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
        losses, ratio, clipped = clipped_policy_loss(
            logprobs - logprobs.detach() + shift,
            shift.new_zeros(()),
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return losses, {"policy/clip_fraction": clipped.float().sum(), "policy/ratio": ratio.detach().sum()}
