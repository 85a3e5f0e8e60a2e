"""Losses per token. Shapes: every argument and result is [N], aligned as `Batch` says."""

from __future__ import annotations

from torch import Tensor, maximum


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated, token by token.

    Returns the loss, the probability ratios, and where the clipped branch was the one that counted.
    """
    ratio = (logprobs - old_logprobs).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return maximum(plain, clipped), ratio, clipped > plain
