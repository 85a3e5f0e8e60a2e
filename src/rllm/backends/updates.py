"""What an update is on every backend: what a batch must have, which part each update takes, and what is told of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.losses import kl_divergence
from rllm.errors import ConfigError


def check_batch(batch: Batch, algorithm: Algorithm) -> None:
    """Refuse a batch without what the algorithm needs, before anything is changed.

    Raises:
        ConfigError: naming what it lacks.
    """
    name = type(algorithm).__name__
    if algorithm.needs_reference and batch.ref_logprobs is None and len(batch):
        raise ConfigError(
            f"algorithm.kl_coef={algorithm.kl_coef}: the batch has no log-probabilities of a reference; set its "
            "ref_logprobs to score_reference(batch), or use kl_coef=0"
        )
    if algorithm.needs_values and (batch.values is None or batch.returns is None) and len(batch):
        raise ConfigError(
            f"algorithm.name: {name} has a critic, and the batch has no values or no returns; set its values to "
            "values(batch) and let token_advantages give the returns, or use an algorithm without a critic, such as grpo"
        )


def minibatches(
    batch: Batch, aggregation: Aggregation, *, num_minibatches: int, num_epochs: int
) -> Iterator[tuple[Batch, float]]:
    """The part of each update, and what its loss counts. Neighbours, which share prefixes, stay together."""
    count = min(num_minibatches, len(batch))
    bounds = [len(batch) * part // count for part in range(count + 1)]
    for _ in range(num_epochs):
        for start, stop in itertools.pairwise(bounds):
            part = batch.select(range(start, stop))
            # Weights are shares of the whole batch: scaled up, each minibatch is a mean of its own tokens or sequences.
            yield part, batch.num_tokens / part.num_tokens if aggregation == "token-mean" else len(batch) / len(part)


def aligned(batch: Batch, estimates: Tensor) -> Batch:
    """The batch with its tensors where the estimates are, and its numbers at least as precise as they are."""

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.to(estimates.device)
        return value.to(estimates.device, torch.promote_types(value.dtype, estimates.dtype))

    tensors = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: moved(value) for name, value in tensors.items() if isinstance(value, Tensor)})


@dataclass(kw_only=True)
class Progress:
    """What is known of one model's updates on a batch."""

    name: str
    """`policy` or `critic`; the group of the metrics."""
    sums: Counter[str] = field(default_factory=Counter)
    """Over all tokens of all updates, by the metrics' names; `loss` is a sum over updates."""
    norms: list[float] = field(default_factory=list)

    def note(self, sums: Counter[str], norm: float) -> None:
        """One more update."""
        self.sums.update(sums)
        self.norms.append(norm)

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Means over `num_tokens`, the tokens of all updates; of the loss and the gradient's norm over updates."""
        if not self.norms:
            return {}
        per_token = {name: value / num_tokens for name, value in self.sums.items() if name != "loss"}
        return {
            **per_token,
            f"{self.name}/loss": self.sums["loss"] / len(self.norms),
            f"{self.name}/grad_norm": sum(self.norms) / len(self.norms),
        }


def batch_metrics(batch: Batch, logprobs: Tensor, *, num_forward: int) -> dict[str, float]:
    """What the batch was like.

    Args:
        batch: what was learned from.
        logprobs: [N] the trainer's, before the update.
        num_forward: how many tokens a pass over the batch computes.
    """
    metrics = {
        "tokens/trained": float(batch.num_tokens),
        "tokens/forward": float(num_forward),
        "tokens/shared": 1.0 - num_forward / sum(len(item.ids) - 1 for item in batch.sequences),
    }
    if batch.sampler_logprobs is not None:
        gap = (logprobs - batch.sampler_logprobs).abs()
        metrics["policy/sampler_gap_mean"] = float(gap.mean())
        metrics["policy/sampler_gap_max"] = float(gap.max())
        metrics["policy/sampler_kl"] = float(kl_divergence(batch.sampler_logprobs, logprobs, "k3").mean())
    if batch.returns is not None and batch.values is not None:
        metrics["critic/return"] = float(batch.returns.mean())
        metrics["critic/explained_variance"] = explained_variance(batch.values, batch.returns)
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """The share of the returns' variance that the values foresaw: 1 all of it, 0 none, below 0 worse than their mean."""
    variance = returns.var(correction=0)
    return float(1.0 - (returns - values).var(correction=0) / variance) if variance > 0 else 0.0
