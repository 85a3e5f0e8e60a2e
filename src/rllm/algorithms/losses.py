"""Losses per token, and their parts. Shapes: every argument and result is [N], aligned as `Batch` defines."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, maximum, minimum

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound on the absolute logarithm of a ratio, so that no ratio is infinite: the largest is half a billion."""


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the probability ratio of each token."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated, token by token.

    With `dual_clip` (Ye et al. 2020) the loss of a bad token ends at `dual_clip` times its advantage, however likely
    the token has become.

    Returns the losses, the probability ratios, and where a clipped branch was used.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = maximum(plain, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, minimum(losses, -advantages * dual_clip), losses)
    return losses, ratio, losses != plain


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) from the sampled token alone (Schulman 2020).

    With `d = logprobs - ref_logprobs`: `k1 = d`, `k2 = d² / 2`, `k3 = exp(-d) - 1 + d`. The gradient is always `k2`'s,
    `d * grad(logprobs)`: for tokens of the policy itself its expectation is the gradient of the divergence, while the
    expected gradient of `k1` is zero, and `k3`'s belongs to the opposite divergence.
    """
    distance = logprobs - ref_logprobs
    square = 0.5 * distance.square()
    if estimator == "k2":
        return square
    value = distance if estimator == "k1" else probability_ratio(ref_logprobs, logprobs) - 1.0 + distance
    return square + (value - square).detach()


def pull_of_teacher(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return the teacher's log-probability of each token less the policy's, in nats (Lu et al. 2025).

    Its negated mean over the policy's own tokens estimates the reverse divergence KL(policy || teacher); as an
    advantage it has that divergence's gradient. It is bounded, since a token may be impossible for a teacher.
    """
    return (teacher_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mean_by_sequence(values: Tensor, sequence_of: Tensor) -> Tensor:
    """Return the mean over each token's own sequence, at every token; gradients pass through."""
    num_sequences = int(sequence_of.max()) + 1 if len(sequence_of) else 0
    sums = values.new_zeros(num_sequences).index_add(0, sequence_of, values)
    lengths = torch.bincount(sequence_of).clamp(min=1)
    return (sums / lengths)[sequence_of]


def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sequence_of: Tensor,
    *,
    level: Literal["token", "sequence"],
    cap: float,
    floor: float | None = None,
    mode: Literal["truncate", "mask"],
) -> Tensor:
    """Return the weight of each token for a sampler that differs from the trainer (Yao et al. 2025).

    The weight is trainer probability over sampler probability, of the token or (geometric mean) of its sequence.
    `truncate` bounds it by `cap`, and by `floor` if given; `mask` gives 0 to what lies above `cap` or below `floor`,
    by default `1 / cap` (IcePop's mask, Ling Team 2025). No gradient.
    """
    gap = (old_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        gap = mean_by_sequence(gap, sequence_of)
    weights = gap.exp()
    if mode == "truncate":
        return weights.clamp(min=floor, max=cap)
    is_inside = (weights <= cap) & (weights >= (1.0 / cap if floor is None else floor))
    return torch.where(is_inside, weights, torch.zeros_like(weights))


EPSILON = 1e-8
"""Avoids a division by zero for values that hardly vary."""


def whitened(values: Tensor) -> Tensor:
    """Return the values with mean 0 and (population) standard deviation 1; exactly 0 if they are equal."""
    distances = (values - values[:1]).double()
    distances = distances - distances.mean()
    return (distances / (distances.square().mean().sqrt() + EPSILON)).to(values.dtype)
