"""The optimizer's input: token sequences, and one number for each of their trained tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rllm.algorithms.tree import TokenTree, build_tree, end_of_shared
from rllm.errors import TokenMismatchError

Aggregation: TypeAlias = Literal[
    "token-mean", "trajectory-mean-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"
]
MOST_REPEATED = 1 / 6
"""Fraction of a run that may be computed again in the next one, if runs end early; see `Batch.split`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan:
    """Tokens of a sequence that one step sampled."""

    step_id: str
    start: int
    """Position in the sequence of the first token that the step sampled."""
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One or more steps whose tokens extend each other, as one sequence. Built only by `trainer.sequences`."""

    ids: list[int]
    """Prompt, sampled and inserted tokens (tool results, user turns) in order."""
    spans: list[StepSpan]
    """Sampled ranges, in order and disjoint; only these tokens are trained on."""
    logprobs: list[float] | None
    """The sampler's log-probability of each sampled token; as long as the spans together. `None` for
    demonstrations, which no policy sampled."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and self.num_sampled != len(self.logprobs):
            raise TokenMismatchError(f"{self.num_sampled} sampled tokens have {len(self.logprobs)} log-probabilities")
        end = 1  # a token only has a probability after another one
        for span in self.spans:
            if not end <= span.start <= span.stop <= len(self.ids):
                raise TokenMismatchError(
                    f"step {span.step_id} sampled tokens {span.start} to {span.stop} of {len(self.ids)}: steps must "
                    "follow a prompt, in order and without overlap"
                )
            end = span.stop

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that are trained on."""
        return sum(span.stop - span.start for span in self.spans)

    def sampled_positions(self) -> list[int]:
        """Return the positions of the sampled tokens, in order."""
        return [position for span in self.spans for position in range(span.start, span.stop)]


@dataclass(kw_only=True)
class Batch:
    """Sequences to train on, with tensors about their tokens.

    **The alignment rule**: a tensor of shape [N] has one entry for each *sampled* token, sequence after sequence, in
    the order of the tokens. Entry n is about that token: `logprobs[n]` is its log-probability given all tokens before
    it, `advantages[n]` the advantage of having sampled it. There is no padding and no shift.
    """

    sequences: list[TokenSequence]
    ids: Tensor  # [N] the sampled token ids
    sequence_of: Tensor  # [N] index of the sequence that each belongs to
    sampler_logprobs: Tensor | None  # [N]; None for demonstrations, which no policy sampled
    advantages: Tensor  # [N]
    weights: Tensor  # [N] weight of each token's loss; see `with_weights`
    old_logprobs: Tensor | None = None  # [N] the trainer's, before the first update on this batch
    ref_logprobs: Tensor | None = None  # [N] the reference model's
    teacher_logprobs: Tensor | None = None  # [N] the teacher's
    trajectory_of: Tensor | None = None  # [N] which trajectory each belongs to; its tokens lie together, in order
    group_of: Tensor | None = None  # [N] which group of trajectories each belongs to, while tokens are credited
    energies: Tensor | None = None  # [N] the squared norm of the gradient of its log-probability by the logits
    rewards: Tensor | None = None  # [N] what was earned by having chosen the token, for critics
    values: Tensor | None = None  # [N] the critic's estimate of what follows, before the token is chosen
    returns: Tensor | None = None  # [N] what the critic should have estimated
    temperature: float = 1.0
    """The temperature that the tokens were sampled with; trainer log-probabilities are taken at the same one."""
    _tree: TokenTree | None = field(default=None, repr=False)

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], *, temperature: float = 1.0) -> Batch:
        """Return the batch of these sequences, with zero advantages and token-mean weights."""
        lengths = torch.tensor([sequence.num_sampled for sequence in sequences], dtype=torch.long)
        total = int(lengths.sum())
        sampled = [sequence.ids[place] for sequence in sequences for place in sequence.sampled_positions()]
        return cls(
            sequences=list(sequences),
            ids=torch.tensor(sampled, dtype=torch.long),
            sequence_of=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
            sampler_logprobs=_known_logprobs(sequences),
            advantages=torch.zeros(total),
            weights=torch.full((total,), 1.0 / max(total, 1)),
            temperature=temperature,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """N, the number of sampled tokens."""
        return len(self.ids)

    @property
    def tree(self) -> TokenTree:
        """The sequences as prefix trees, each without its last token: nothing is predicted from that."""
        if self._tree is None:
            self._tree = build_tree([sequence.ids[:-1] for sequence in self.sequences])
        return self._tree

    def with_weights(self, aggregation: Aggregation, fixed_length: int | None = None) -> Batch:
        """Return the batch whose loss `sum(weights * token_loss)` is the named mean over the *whole* batch.

        The weights are fixed here, before the batch is split, so that the sum over any number of micro-batches is the
        same loss.
        """
        if aggregation != "trajectory-mean-token-mean":
            return replace(self, weights=token_weights(self.sequence_of, len(self), aggregation, fixed_length))
        assert self.trajectory_of is not None, "the batch knows its trajectories"
        trajectories, numbers = self.trajectory_of.unique(return_inverse=True)
        return replace(self, weights=token_weights(numbers, len(trajectories), "seq-mean-token-mean"))

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the part of the batch with these sequences, in the batch's order; tokens keep their weights."""
        if len(indices) == len(self):
            return self  # and its tree, if that is built
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[list(indices)] = True
        kept = chosen[self.sequence_of]
        renumbered = torch.cumsum(chosen, 0) - 1
        per_token = {
            item.name: value[kept] for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)
        }
        per_token["sequence_of"] = renumbered[per_token["sequence_of"]]
        sequences = [sequence for sequence, keep in zip(self.sequences, chosen.tolist(), strict=True) if keep]
        return replace(self, sequences=sequences, _tree=None, **per_token)

    def split(self, max_tokens: int, aim: int | None = None) -> Iterator[list[int]]:
        """Yield sequence indices in runs whose token trees hold about `max_tokens`.

        Neighbours, which share prefixes, stay together. A single sequence may exceed the limit.

        Args:
            max_tokens: bound of a run's tokens.
            aim: fewer tokens, at which a run should end if what it shares with the next one, which is then computed
                again, is at most a sixth of it. It ends where that part is smallest.
        """
        shared = [
            end_of_shared([self.sequences[index - 1].ids, item.ids]) if index else 0
            for index, item in enumerate(self.sequences)
        ]
        start = 0
        while start < len(self):
            stop = self._end_of_run(start, shared, max_tokens, max_tokens if aim is None else min(aim, max_tokens))
            yield list(range(start, stop))
            start = stop

    def _end_of_run(self, start: int, shared: Sequence[int], max_tokens: int, aim: int) -> int:
        """Return the end of the run that begins with a sequence, given what each shares with the one before it."""
        size = len(self.sequences[start].ids)
        best, least = 0, MOST_REPEATED
        for index in range(start + 1, len(self)):
            repeated = shared[index] / size
            if repeated <= least:
                best, least = index, repeated
            size += len(self.sequences[index].ids) - shared[index]
            if aim < size and best and aim < max_tokens:
                return best
            if size > max_tokens:
                return index
        return len(self)


def token_weights(
    sequence_of: Tensor, num_sequences: int, aggregation: Aggregation, fixed_length: int | None = None
) -> Tensor:
    """Return [N] weights under which a sum over tokens is the named mean.

    `token-mean`: every token counts the same. `seq-mean-token-mean`: every sequence counts the same, and its tokens
    share its weight. `seq-mean-token-sum`: every token counts 1 / number of sequences. `fixed-length`: the same,
    divided by `fixed_length`, so that no length is favoured and the scale does not grow with it (Liu et al. 2025).
    `trajectory-mean-token-mean` is `seq-mean-token-mean` with trajectories for sequences: see `Batch.with_weights`.
    """
    total = len(sequence_of)
    if aggregation == "token-mean":
        return torch.full((total,), 1.0 / max(total, 1))
    if aggregation in ("seq-mean-token-sum", "fixed-length"):
        return torch.full((total,), 1.0 / (max(num_sequences, 1) * (fixed_length or 1)))
    lengths = torch.bincount(sequence_of)
    return 1.0 / (num_sequences * lengths[sequence_of])


def _known_logprobs(sequences: Sequence[TokenSequence]) -> Tensor | None:
    """Return [N] the sampler's log-probabilities; `None` if sequences are demonstrations."""
    values: list[float] = []
    for sequence in sequences:
        if sequence.logprobs is None:
            return None
        values += sequence.logprobs
    return torch.tensor(values, dtype=torch.float32)
