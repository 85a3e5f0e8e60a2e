"""OTB: a baseline for each position, from siblings weighted by the accumulated energy of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.ppo import returns_of

EPSILON = 1e-8
"""Keeps a group of certain tokens from dividing by zero."""


@dataclass(frozen=True, kw_only=True)
class OTB(Algorithm):
    """Optimal token baseline (Li et al. 2026, arXiv:2602.07078): the return of a token, minus the group's mean of it.

    That mean, over the tokens at the same position of each trajectory of the group, is weighted by the energy of each
    trajectory up to there: the sum of `1 - 2 p + sum of all p²`, the squared norm of the gradient by the logits of a
    token of probability p. It gives the gradient the least variance.
    """

    min_group_size: ClassVar[int] = 2
    needs_energies: ClassVar[bool] = True

    @property
    def credits_tokens(self) -> bool:
        return True

    def token_advantages(self, batch: Batch) -> tuple[Tensor, None]:
        assert batch.trajectory_of is not None, "tokens are credited along their trajectory"
        assert batch.group_of is not None, "tokens are compared with siblings' tokens"
        assert batch.energies is not None, "the batch was scored"
        returns = returns_of(batch, self.gamma)
        advantages = returns.clone()
        for group in batch.group_of.unique():
            (tokens,) = (batch.group_of == group).nonzero(as_tuple=True)
            _, sizes = batch.trajectory_of[tokens].unique_consecutive(return_counts=True)
            parts = sizes.tolist()
            earned, energies = (pad_sequence(values[tokens].split(parts)) for values in (returns, batch.energies))
            baseline = position_baseline(earned, energies, sizes)
            advantages[tokens] -= torch.cat([baseline[:size] for size in parts])
        return advantages, None


def position_baseline(returns: Tensor, energies: Tensor, sizes: Tensor) -> Tensor:
    """Return [L] the baseline at each position of a group: 0 where a single trajectory is left.

    Args:
        returns: [L, trajectories], padded after the end of each.
        energies: [L, trajectories] of single tokens.
        sizes: [trajectories] their numbers of tokens.
    """
    exists = torch.arange(len(returns))[:, None] < sizes
    weights = energies.cumsum(0) * exists
    means = (returns * weights).sum(1) / (weights.sum(1) + EPSILON)
    return torch.where(exists.sum(1) > 1, means, torch.zeros_like(means))
