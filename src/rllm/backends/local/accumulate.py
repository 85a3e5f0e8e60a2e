"""The gradient of a batch's loss, micro-batch by micro-batch: their number never changes the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from rllm.algorithms.base import Sums
from rllm.algorithms.batch import Batch
from rllm.backends.local.optimizer import MasterAdamW

LossOf: TypeAlias = Callable[[Batch], tuple[Tensor, Sums, Tensor]]
"""The loss of a part of a batch, sums over its tokens, and the estimates [N] that the loss is of."""


def accumulate(
    batch: Batch, loss_of: LossOf, optimizer: MasterAdamW, *, max_tokens: int, scale: float = 1.0
) -> tuple[Tensor, Counter[str]]:
    """Add the gradient of `scale` times the loss to the optimiser's weights.

    The loss is a sum over tokens whose weights were fixed for the whole batch, so the parts' gradients add up to its own.

    Returns the estimates [N], detached, in main memory; and the sums, `loss` among them.
    """
    sums: Counter[str] = Counter()
    pieces = []
    for run in batch.split(max_tokens):
        loss, reported, estimates = loss_of(batch.select(run))
        (loss * scale).backward()
        optimizer.collect()
        sums.update({name: float(value) for name, value in reported.items()})
        sums.update({"loss": float(loss.detach()) * scale})
        pieces.append(estimates.detach().cpu())
    return torch.cat(pieces), sums
