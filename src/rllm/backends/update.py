"""One update of any backend: optimizer steps over the minibatches and epochs of a batch, and their metrics."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Aggregation, Batch
from rllm.algorithms.losses import kl_divergence, probability_ratio
from rllm.backends.base import Role, StepResult, TrainingBackend, UpdateResult
from rllm.config.schema import TrainConfig
from rllm.config.sizes import num_updates
from rllm.errors import TokenMismatchError


def update_weights(backend: TrainingBackend, batch: Batch, algorithm: Algorithm) -> UpdateResult:
    """Take one optimizer step for each minibatch of each epoch; with `batch.returns` on the critic, too.

    Raises:
        TokenMismatchError: if the backend's log-probabilities do not align with the batch.
    """
    if len(batch) == 0:
        return UpdateResult()
    plan = backend.begin_update(batch)
    num_steps = plan.num_minibatches * plan.num_epochs
    if batch.old_logprobs is None and (plan.policy_waits or num_steps > 1):
        batch = replace(batch, old_logprobs=backend.score(batch))
    policy, critic = _Steps("policy"), _Steps("critic")
    times = {"num_minibatches": plan.num_minibatches, "num_epochs": plan.num_epochs}
    for part, scale in minibatches(batch, algorithm.aggregation, **times):
        if batch.returns is not None:
            critic.add(backend.step("critic", part, algorithm, scale=scale))
        if not plan.policy_waits:
            if algorithm.masks_minibatches:
                part, masked = algorithm.masked(part, backend.score(part))
                policy.sums.update({name: float(value) for name, value in masked.items()})
            result = backend.step("policy", part, algorithm, scale=scale)
            given = 0 if result.logprobs is None else len(result.logprobs)
            if given != part.num_tokens:
                raise TokenMismatchError(f"the backend returned {given} log-probabilities for {part.num_tokens} tokens")
            policy.add(result)
    # Only a batch with a single step is not scored before it: then the step saw the policy as it was.
    before = policy.logprobs[0] if batch.old_logprobs is None else batch.old_logprobs
    num_tokens = batch.num_tokens * plan.num_epochs
    metrics = {
        **policy.metrics(num_tokens),
        **critic.metrics(num_tokens),
        **batch_metrics(batch, before, num_forward_tokens=plan.num_forward_tokens),
        "optim/lr": backend.learning_rate,
        "optim/num_updates": float(len(policy.grad_norms)),
    }
    update = UpdateResult(metrics=metrics, logprobs=before, memory={**critic.memory, **policy.memory})
    # Each epoch passes over all tokens in their order: the first has the entropies, the last the final ratios.
    if policy.logprobs:
        update.ratios = probability_ratio(torch.cat(policy.logprobs)[-len(before) :], before)
    if policy.entropies:
        update.entropies = torch.cat(policy.entropies)[: len(before)]
    return update


def minibatches(
    batch: Batch, aggregation: Aggregation, *, num_minibatches: int, num_epochs: int
) -> Iterator[tuple[Batch, float]]:
    """Yield each optimizer step's part and the scale of its loss; neighbours, which share prefixes, stay together."""
    count = min(num_minibatches, len(batch))
    bounds = [len(batch) * part // count for part in range(count + 1)]
    for _ in range(num_epochs):
        for start, stop in itertools.pairwise(bounds):
            part = batch.select(range(start, stop))
            # Weights are fractions of the whole batch: scaled up, each minibatch is a mean of its own tokens,
            # trajectories or sequences.
            if aggregation == "token-mean":
                yield part, batch.num_tokens / part.num_tokens
            elif aggregation == "trajectory-mean-token-mean":  # a trajectory may be in several minibatches
                yield part, float(batch.weights.sum() / part.weights.sum())
            else:
                yield part, len(batch) / len(part)


def aligned(batch: Batch, estimates: Tensor) -> Batch:
    """Return the batch with its tensors on the device of the estimates, and at least as precise as these."""

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.to(estimates.device)
        return value.to(estimates.device, torch.promote_types(value.dtype, estimates.dtype))

    tensors = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: moved(value) for name, value in tensors.items() if isinstance(value, Tensor)})


@dataclass
class _Steps:
    """Results of one model's optimizer steps on a batch."""

    role: Role
    sums: Counter[str] = field(default_factory=Counter)
    grad_norms: list[float] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    memory: Mapping[str, int] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        self.sums.update(result.sums)
        self.grad_norms.append(result.grad_norm)
        self.memory = result.memory
        if result.logprobs is not None:
            self.logprobs.append(result.logprobs)
        if result.entropies is not None:
            self.entropies.append(result.entropies)

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return means over the tokens of all steps; for the loss and the gradient's norm, means over steps."""
        if not self.grad_norms:
            return {}
        per_token = {name: value / num_tokens for name, value in self.sums.items() if name != "loss"}
        return {
            **per_token,
            f"{self.role}/loss": self.sums["loss"] / len(self.grad_norms),
            f"{self.role}/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
        }


def batch_metrics(batch: Batch, logprobs: Tensor, *, num_forward_tokens: int) -> dict[str, float]:
    """Return metrics of the batch itself; `logprobs` [N] are the trainer's before the update."""
    metrics = {
        "tokens/trained": float(batch.num_tokens),
        "tokens/forward": float(num_forward_tokens),
        "tokens/shared": 1.0 - num_forward_tokens / sum(len(item.ids) - 1 for item in batch.sequences),
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
    """Return the fraction of the returns' variance that the values predict; below 0 they are worse than the mean."""
    variance = returns.var(correction=0)
    return float(1.0 - (returns - values).var(correction=0) / variance) if variance > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate of each optimizer step: it rises during the warm-up, then stays or decays to zero."""

    lr: float
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Optimizer steps after which the learning rate has fallen to zero; `None` keeps it."""
    decay: Literal["linear", "cosine"] = "linear"

    @classmethod
    def of_policy(cls, config: TrainConfig) -> Schedule:
        """Return the policy's schedule over all steps of a run."""
        optim, schedule = config.optim, config.optim.schedule
        constant = cls(lr=optim.rate, warmup_steps=optim.warmup_steps)
        return (
            constant if schedule == "constant" else replace(constant, decay_steps=num_updates(config), decay=schedule)
        )

    def learning_rate(self, num_steps: int) -> float:
        """Return the learning rate of a step, counted from 1; 0 is before the first."""
        if num_steps < self.warmup_steps:
            return self.lr * num_steps / self.warmup_steps
        if not self.decay_steps:
            return self.lr
        after_warmup = max(num_steps - self.warmup_steps - 1, 0)
        done = min(after_warmup / max(self.decay_steps - self.warmup_steps, 1), 1.0)
        return self.lr * (1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
