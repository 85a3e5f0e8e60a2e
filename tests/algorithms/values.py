"""Groups and batches, given by their rewards and numbers per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.types import Step, Trajectory, TrajectoryGroup


def group_of(*rewards: float, lengths: Sequence[int] = (), **fields: Any) -> TrajectoryGroup:
    """Return trajectories with these rewards and numbers of sampled tokens."""
    sizes = lengths or [0] * len(rewards)
    return TrajectoryGroup(
        trajectories=[
            Trajectory(reward=reward, steps=[Step(prompt_ids=[0], response_ids=[1] * size)])
            for reward, size in zip(rewards, sizes, strict=True)
        ],
        **fields,
    )


def batch_of(*advantages: Sequence[float], **per_token: Sequence[float] | None) -> Batch:
    """Return sequences with these numbers of sampled tokens, one per trajectory; other tensors as lists over all tokens."""
    batch = Batch.of(
        [
            TokenSequence(
                ids=list(range(len(row) + 1)),
                spans=[StepSpan(step_id=f"s{number}", start=1, stop=1 + len(row))],
                logprobs=[-1.0] * len(row),
            )
            for number, row in enumerate(advantages)
        ]
    )
    batch.advantages = torch.tensor([value for row in advantages for value in row])
    batch.trajectory_of = batch.sequence_of
    for name, values in per_token.items():
        if values is not None:
            setattr(batch, name, torch.tensor(values))
    return batch


def gradient(loss: Callable[[Tensor], Tensor], at: Sequence[float]) -> list[float]:
    """Return the gradient of the loss with respect to each token's number."""
    values = torch.tensor(at, requires_grad=True)
    loss(values).backward()
    assert values.grad is not None
    return values.grad.tolist()
