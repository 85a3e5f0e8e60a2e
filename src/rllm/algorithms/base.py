"""What an algorithm is: a credit for each trajectory of a group, and a loss over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.losses import clipped_policy_loss
from rllm.errors import ConfigError
from rllm.types import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A policy-gradient algorithm; its fields are its configuration. Subclasses give `credit`."""

    min_group_size: ClassVar[int] = 1
    """How many rollouts of a task it needs to compare."""

    clip_low: float = 0.2
    """How far below 1 a token's probability ratio may fall before its gradient stops."""
    clip_high: float = 0.2
    """How far above 1 it may rise."""
    aggregation: Aggregation = "token-mean"
    """Whether the loss is a mean over tokens or over sequences."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"algorithm.{name}={value!r}: use a number above 0, such as 0.2")

    def credit(self, group: TrajectoryGroup) -> list[float]:
        """The advantage of each trajectory of a group, in order."""
        raise NotImplementedError(f"{type(self).__name__} must define credit(group)")

    def baseline(self, group: TrajectoryGroup) -> float | None:
        """What the rewards of a group were compared with, for the records."""
        return None

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of (a part of) a batch, and sums over its tokens that are of interest.

        Args:
            logprobs: [N], with gradient.
            batch: what they are the log-probabilities of. `old_logprobs` of `None` means that this is the first update
                on the batch, so that they equal `logprobs`.
        """
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        losses, ratio, clipped = clipped_policy_loss(
            logprobs, old, batch.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        with torch.no_grad():
            sums = {"policy/clip_fraction": clipped.float().sum(), "policy/ratio": ratio.sum()}
        return (losses * batch.weights).sum(), sums
