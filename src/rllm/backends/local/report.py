"""What an update did, as metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.algorithms.losses import kl_divergence
from rllm.backends.local.critic import explained_variance


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


def batch_metrics(batch: Batch, logprobs: Tensor) -> dict[str, float]:
    """What the batch was like: `logprobs` are the trainer's before the update."""
    metrics = {
        "tokens/trained": float(batch.num_tokens),
        "tokens/forward": float(len(batch.tree.ids)),
        "tokens/shared": 1.0 - len(batch.tree.ids) / sum(len(item.ids) - 1 for item in batch.sequences),
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
