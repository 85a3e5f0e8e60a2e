"""Losses of verl's workers: those of our algorithms, or a policy loss of verl's own. Runs in the workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Aggregation, Batch
from rllm.backends.update import aligned
from rllm.backends.verl.rows import MASK, at_tokens, batch_of

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig

LOSS, LOGPROBS, ROWS = "rllm/loss", "rllm/logprobs", "rllm/rows"
"""Metrics of a micro-batch: its loss, its log-probabilities before the update, and its rows."""

AGGREGATIONS: dict[Aggregation, str] = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "fixed-length": "seq-mean-token-sum-norm",
}
"""Our names of aggregations, and verl's, which has no mean over trajectories."""

MEAN_OF_SEQUENCES: dict[str, str | None] = {"geo_mean": None, "gspo": "0.9.1", "sapo": None}
"""verl's losses that ignore the aggregation and average over sequences, and the version of verl that fixes each."""
OF_MICRO_BATCH = {"geo_mean"}
"""Those of them that average over the sequences of a micro-batch instead of the whole batch."""


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of a policy, which verl calls once for each micro-batch.

    verl averages gradients over its data-parallel workers, and sums them over micro-batches. The weights of a batch are
    fractions of the whole, so the result is the sum times the number of workers.
    """

    algorithm: Algorithm
    verl_config: ActorConfig | None = None
    """verl's configuration of an actor, to use its own `policy_loss.loss_mode`."""

    def __call__(
        self, model_output: dict[str, Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[Tensor, dict[str, object]]:
        logprobs, entropy = (at_tokens(model_output[name], data[MASK]) for name in ("log_probs", "entropy"))
        batch = aligned(batch_of(data), logprobs)
        loss, sums = self.loss(logprobs, batch, entropy)
        sums = {**sums, "policy/entropy": entropy.detach().sum()}
        found = {LOGPROBS: logprobs.detach().cpu(), ROWS: data["row"].cpu()}
        return loss * data["dp_size"], {**metrics_of(loss, sums), **found}

    def loss(self, logprobs: Tensor, batch: Batch, entropy: Tensor) -> tuple[Tensor, Sums]:
        """Return the loss of (part of) a batch, and sums over its tokens."""
        if self.verl_config is None:
            return self.algorithm.loss(logprobs, batch, entropy)
        # Without advantages, our loss is reduced to the terms of divergence and entropy.
        rest, sums = self.algorithm.loss(logprobs, replace(batch, advantages=torch.zeros_like(logprobs)), entropy)
        surrogate, found = surrogate_of_verl(logprobs, batch, self.algorithm, self.verl_config)
        kept = {name: value for name, value in sums.items() if name not in ("policy/clip_fraction", "policy/ratio")}
        return surrogate + rest, {**kept, **found}


@dataclass(frozen=True)
class ValueLoss:
    """Loss of a critic, which verl calls once for each micro-batch."""

    algorithm: Algorithm

    def __call__(
        self, model_output: dict[str, Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[Tensor, dict[str, object]]:
        values = at_tokens(model_output["values"], data[MASK])
        loss, sums = self.algorithm.value_loss(values, aligned(batch_of(data), values))
        return loss * data["dp_size"], metrics_of(loss, sums)


def surrogate_of_verl(logprobs: Tensor, batch: Batch, algorithm: Algorithm, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Return verl's policy loss `config.policy_loss.loss_mode`, averaged as the batch's weights are."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    mode, sizes = config.policy_loss.loss_mode, sizes_of_whole(batch, algorithm)
    config.global_batch_info.update(sizes, dp_size=1)
    correction = None if algorithm.correction == "none" else algorithm.correction_weights(old, batch)
    loss, found = get_policy_loss_fn(mode)(
        old_log_prob=padded(old, batch),
        log_prob=padded(logprobs, batch),
        advantages=padded(batch.advantages, batch),
        response_mask=padded(torch.ones_like(logprobs, dtype=torch.bool), batch),
        loss_agg_mode=AGGREGATIONS[algorithm.aggregation],
        config=config,
        rollout_is_weights=None if correction is None else padded(correction, batch),
    )
    if mode in OF_MICRO_BATCH:
        loss = loss * len(batch) / sizes["global_batch_size"]
    count = len(logprobs)  # verl reports means over its micro-batch; these are sums
    return loss, {
        name.replace("actor/", "policy/"): torch.tensor(float(value)) * count for name, value in found.items()
    }


def sizes_of_whole(batch: Batch, algorithm: Algorithm) -> dict[str, float | int | None]:
    """Return the numbers of tokens and sequences that the loss averages over, derived from the batch's weights."""
    length = algorithm.fixed_length
    if not batch.num_tokens:
        return {"batch_num_tokens": 1.0, "global_batch_size": 1.0, "loss_scale_factor": length}
    weight, own_length = float(batch.weights[0]), int((batch.sequence_of == batch.sequence_of[0]).sum())
    assert algorithm.aggregation != "trajectory-mean-token-mean", "check_settings refuses it"
    divisors = {"token-mean": 1, "seq-mean-token-mean": own_length, "seq-mean-token-sum": 1, "fixed-length": length}
    count = 1.0 / (weight * (divisors[algorithm.aggregation] or 1))
    return {"batch_num_tokens": count, "global_batch_size": count, "loss_scale_factor": length}


def padded(values: Tensor, batch: Batch) -> Tensor:
    """Return [sequences, longest answer] of values [N], with zeros after the end of shorter ones."""
    counts = torch.bincount(batch.sequence_of, minlength=len(batch)).tolist()
    rows: Tensor = torch.nn.utils.rnn.pad_sequence(values.split(counts), batch_first=True)
    return rows


def metrics_of(loss: Tensor, sums: Sums) -> dict[str, object]:
    """Return the metrics of a micro-batch: sums, which the driver adds up."""
    return {LOSS: float(loss.detach()), **{name: float(value) for name, value in sums.items()}}
