"""A `Batch` as verl's workers take it, one unpadded row for each sequence, their answers back, and the losses on rows.

Shapes: N sampled tokens of the batch, L tokens of all rows together. A *flat* tensor [L] has one entry for each token
of each row, row after row; numbers of sampled tokens are at their positions in it, with zeros in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Aggregation, Batch, StepSpan, TokenSequence
from rllm.backends.update import aligned

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig

MASK, NUMBERS = "loss_mask", "of_"
"""Name of the mask of sampled tokens, which verl counts, and prefix of our own tensors' names."""
LONGEST = "longest"
"""Name of the length of the longest row, which all workers need."""
_NOT_NUMBERS = {"ids", "sequence_of"}


@dataclass(frozen=True)
class Rows:
    """Sequences of a batch in the order in which they go to the workers."""

    batch: Batch
    order: list[int]
    """Sequence of each row. Worker k of n gets the k-th of n equal parts of the rows."""
    is_real: list[bool]
    """False for rows that only make the workers' parts equal: none of their tokens is trained on or reported."""

    @classmethod
    def dealt(cls, batch: Batch, num_workers: int) -> Rows:
        """Divide the batch into parts of about equally many tokens: the longest sequences first, back and forth."""
        lengths = [len(sequence.ids) for sequence in batch.sequences]
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        fillers = [longest_first[-1]] * (-len(lengths) % num_workers)
        cards = [(index, True) for index in longest_first] + [(index, False) for index in fillers]
        hands: list[list[tuple[int, bool]]] = [[] for _ in range(num_workers)]
        for start in range(0, len(cards), num_workers):
            turn = cards[start : start + num_workers]
            for hand, card in zip(hands, turn if start // num_workers % 2 == 0 else reversed(turn), strict=True):
                hand.append(card)
        dealt = [card for hand in hands for card in hand]
        return cls(batch, [index for index, _ in dealt], [real for _, real in dealt])

    @cached_property
    def offsets(self) -> Tensor:
        """[rows + 1] start of each row in a flat tensor."""
        lengths = [len(self.batch.sequences[index].ids) for index in self.order]
        return torch.tensor([0, *lengths]).cumsum(0)

    @cached_property
    def tokens(self) -> Tensor:
        """[N] index in the batch of each sampled token of the rows."""
        counts = torch.bincount(self.batch.sequence_of, minlength=len(self.batch))
        starts = (counts.cumsum(0) - counts).tolist()
        pairs = zip(self.order, self.is_real, strict=True)
        runs = [torch.arange(starts[index], starts[index] + int(counts[index])) for index, real in pairs if real]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.long)

    @cached_property
    def mask(self) -> Tensor:
        """[L] True at sampled tokens."""
        mask = torch.zeros(int(self.offsets[-1]), dtype=torch.bool)
        for start, index, real in zip(self.offsets.tolist(), self.order, self.is_real, strict=False):
            if real:
                mask[torch.tensor(self.batch.sequences[index].sampled_positions(), dtype=torch.long) + start] = True
        return mask

    def columns(self) -> dict[str, Tensor]:
        """Return the nested tensors of a TensorDict, each [rows, tokens]: verl's inputs, and the batch's numbers."""
        ids = torch.tensor([token for index in self.order for token in self.batch.sequences[index].ids])
        positions = torch.cat([torch.arange(int(size)) for size in self.offsets.diff()])
        flat = {"input_ids": ids, "position_ids": positions, MASK: self.mask.long()}
        for name, values in numbers(self.batch).items():
            flat[NUMBERS + name] = torch.zeros(len(ids), dtype=values.dtype).masked_scatter(
                self.mask, values[self.tokens]
            )
        return {name: torch.nested.nested_tensor_from_jagged(values, self.offsets) for name, values in flat.items()}

    def num_sampled(self) -> list[int]:
        """Return the number of trained tokens of each row."""
        pairs = zip(self.order, self.is_real, strict=True)
        return [self.batch.sequences[index].num_sampled if real else 0 for index, real in pairs]

    def back(self, values: Tensor) -> Tensor:
        """Return [N] values of all rows, as from `at_tokens`, in the batch's order."""
        result = torch.empty(self.batch.num_tokens, dtype=values.dtype)
        result[self.tokens] = values
        return result


def numbers(batch: Batch) -> dict[str, Tensor]:
    """Return the batch's tensors with a number for each token, by name."""
    named = ((item.name, getattr(batch, item.name)) for item in fields(batch) if item.name not in _NOT_NUMBERS)
    return {name: value for name, value in named if isinstance(value, Tensor)}


def at_tokens(outputs: Tensor, mask: Tensor) -> Tensor:
    """Return [N] a model's outputs for the sampled tokens.

    Args:
        outputs: nested [rows, tokens], as verl's engines give them: entry i is about token i + 1.
        mask: nested [rows, tokens], 1 at sampled tokens; never at the first of a row.
    """
    predicted: Tensor = outputs.values().roll(1)
    return predicted[mask.values().bool()]


def batch_of(data: TensorDict) -> Batch:
    """Return part of a batch, in a worker, from some of the rows of `Rows.columns` and the `temperature`."""
    ids, mask = data["input_ids"], data[MASK].values().bool()
    sizes = ids.offsets().diff().tolist()
    rows, sampled = (flat.cpu().split(sizes) for flat in (ids.values(), mask))
    sequences = [_sequence(row.tolist(), of_row.tolist()) for row, of_row in zip(rows, sampled, strict=True)]
    counts = torch.tensor([sequence.num_sampled for sequence in sequences], device=mask.device)
    known = {str(name) for name in data.keys() if str(name).startswith(NUMBERS)}  # noqa: SIM118 - its items are rows
    given = {name.removeprefix(NUMBERS): data[name].values()[mask] for name in known}
    return Batch(
        sequences=sequences,
        ids=ids.values()[mask],
        sequence_of=torch.repeat_interleave(torch.arange(len(sequences), device=mask.device), counts),
        temperature=float(data["temperature"]),
        **{"sampler_logprobs": None, **given},
    )


def _sequence(ids: list[int], sampled: Sequence[bool]) -> TokenSequence:
    """Return the sequence of a row; each run of sampled tokens is a span."""
    edges = [place for place in range(1, len(ids) + 1) if sampled[place - 1] != (place < len(ids) and sampled[place])]
    bounds = iter(edges)
    spans = [StepSpan(step_id="", start=start, stop=stop) for start, stop in zip(bounds, bounds, strict=True)]
    return TokenSequence(ids=ids, spans=spans, logprobs=None)


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
"""Losses among these that average over the sequences of a micro-batch instead of the whole batch."""


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
