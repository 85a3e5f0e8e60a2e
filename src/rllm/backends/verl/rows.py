"""A `Batch` as verl's workers take it: one unpadded row for each sequence, divided evenly; and their answers back.

Shapes: N sampled tokens of the batch, L tokens of all rows together. A *flat* tensor [L] has one entry for each token
of each row, row after row; what is known of sampled tokens lies at their places in it, and zeros between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence

if TYPE_CHECKING:
    from tensordict import TensorDict

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
    """Return the batch's tensors of numbers for each token, by name."""
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
    """Return, in a worker, part of a batch from some of the rows of `Rows.columns`, and `temperature`."""
    ids, mask = data["input_ids"], data[MASK].values().bool()
    sequences = [_sequence(row, sampled) for row, sampled in zip(*_lists(ids, mask), strict=True)]
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


def _lists(ids: Tensor, mask: Tensor) -> tuple[list[list[int]], list[list[bool]]]:
    sizes = ids.offsets().diff().tolist()
    parts = (flat.cpu().split(sizes) for flat in (ids.values(), mask))
    return tuple([row.tolist() for row in rows] for rows in parts)  # type: ignore[return-value]


def _sequence(ids: list[int], sampled: Sequence[bool]) -> TokenSequence:
    """Return the sequence of a row; each run of sampled tokens is a span."""
    edges = [place for place in range(1, len(ids) + 1) if sampled[place - 1] != (place < len(ids) and sampled[place])]
    bounds = iter(edges)
    spans = [StepSpan(step_id="", start=start, stop=stop) for start, stop in zip(bounds, bounds, strict=True)]
    return TokenSequence(ids=ids, spans=spans, logprobs=None)
