"""Steps to token sequences, without re-tokenizing, and the tokens of each step in a batch.

A step whose prompt begins with all tokens of an earlier sequence, prompt and answer, continues that sequence: a
conversation is one sequence, however many turns it has. Any other step begins a new sequence: the agent edited its
history, or the template renders an answer differently from how it was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.capture.session_tree import continues
from rllm.capture.tokens import check_aligned
from rllm.errors import TokenMismatchError
from rllm.types import Step

StepKey: TypeAlias = tuple[int, str]
"""A step in a batch: the number of its trajectory, since several may share a call, and its id."""


def sequences_of(steps: Sequence[Step], *, demonstrated: bool = False) -> list[TokenSequence]:
    """Return the token sequences of one trajectory's steps, in the order in which they begin.

    Steps without sampled tokens are skipped. Demonstrations have no log-probabilities. Raises `TokenMismatchError` if a
    step's ids and log-probabilities disagree.
    """
    paths: list[list[Step]] = []
    for step in steps:
        if not step.response_ids:
            continue
        if not demonstrated:
            check_aligned(step.response_ids, step.logprobs, where=f"step {step.id}: ")
        if not step.prompt_ids:
            raise TokenMismatchError(f"step {step.id}: {len(step.response_ids)} sampled ids after an empty prompt")
        continued = [path for path in paths if continues(step.prompt_ids, path[-1])]
        if continued:
            max(continued, key=lambda path: _num_ids(path[-1])).append(step)
        else:
            paths.append([step])
    return [_sequence(path, demonstrated=demonstrated) for path in paths]


def _sequence(path: Sequence[Step], *, demonstrated: bool) -> TokenSequence:
    """Return the tokens of steps, each of which continues the one before."""
    last = path[-1]
    return TokenSequence(
        ids=[*last.prompt_ids, *last.response_ids],
        spans=[StepSpan(step_id=step.id, start=len(step.prompt_ids), stop=_num_ids(step)) for step in path],
        logprobs=None if demonstrated else list(chain.from_iterable(step.logprobs for step in path)),
    )


def _num_ids(step: Step) -> int:
    return len(step.prompt_ids) + len(step.response_ids)


def step_spans(batch: Batch) -> Iterator[tuple[StepKey, slice]]:
    """Yield each step of the batch, and the place of its tokens in [N]."""
    assert batch.trajectory_of is not None, "the batch knows its trajectories"
    start = 0
    for sequence in batch.sequences:
        for span in sequence.spans:
            stop = start + span.stop - span.start
            yield (int(batch.trajectory_of[start]), span.step_id), slice(start, stop)
            start = stop


def values_by_token(batch: Batch, values: Mapping[StepKey, float]) -> Tensor:
    """Return [N] the value of each token's step."""
    tokens = torch.zeros(batch.num_tokens)
    for key, span in step_spans(batch):
        tokens[span] = values[key]
    return tokens


def sums_by_step(batch: Batch, values: Tensor) -> dict[StepKey, float]:
    """Return the sum of `values` [N] over each step's tokens."""
    return {key: float(values[span].sum()) for key, span in step_spans(batch)}


def token_order(batch: Batch, keys: Iterable[StepKey]) -> Tensor:
    """Return [N] the positions of the tokens, step by step in the order of `keys`, which are all steps of the batch."""
    places: dict[StepKey, list[int]] = {}
    for key, span in step_spans(batch):
        places.setdefault(key, []).extend(range(span.start, span.stop))
    return torch.tensor([place for key in keys for place in places[key]], dtype=torch.long)


def reordered(batch: Batch, order: Tensor) -> Batch:
    """Return the batch with its tokens, though not its sequences, in this order."""
    tensors = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: value[order] for name, value in tensors.items() if isinstance(value, Tensor)})
