"""Conversion of a batch to rows for workers, and back."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.backends.verl.rows import MASK, Rows, at_tokens, batch_of


def sequence(ids: list[int], *spans: tuple[int, int]) -> TokenSequence:
    steps = [StepSpan(step_id="a step", start=start, stop=stop) for start, stop in spans]
    num_sampled = sum(stop - start for start, stop in spans)
    return TokenSequence(ids=ids, spans=steps, logprobs=[-1.0] * num_sampled)


@pytest.fixture
def batch() -> Batch:
    batch = Batch.of(
        [
            sequence([1, 2, 3, 4], (2, 4)),
            sequence([5, 6], (1, 2)),
            sequence([7, 8, 9, 10, 11, 12], (1, 3), (4, 6)),
        ]
    )
    batch.advantages = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    return batch


def next_of(ids: Tensor) -> Tensor:
    """Return 100 times the next token for each token, and 0 for the last one."""
    rows = [torch.cat([100.0 * row[1:], torch.full((1,), -1.0)]) for row in ids.unbind()]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_values_of_rows_map_back_to_tokens(batch: Batch, num_workers: int) -> None:
    rows = Rows.dealt(batch, num_workers)
    columns = rows.columns()
    assert len(rows.order) % num_workers == 0
    answers = at_tokens(next_of(columns["input_ids"]), columns[MASK])
    assert rows.back(answers).tolist() == [100.0 * token for token in batch.ids.tolist()]


def test_padding_rows_hold_no_counted_tokens(batch: Batch) -> None:
    rows = Rows.dealt(batch, 2)
    assert (rows.order, rows.is_real) == ([2, 1, 0, 1], [True, False, True, True])
    assert rows.num_sampled() == [4, 0, 2, 1]
    assert rows.columns()[MASK].sum().item() == batch.num_tokens


def test_long_sequences_are_distributed_evenly() -> None:
    lengths = [100, 90, 80, 70, 20, 10]
    rows = Rows.dealt(Batch.of([sequence([0] * length, (1, 2)) for length in lengths]), 2)
    shares = [[lengths[index] for index in hand] for hand in (rows.order[:3], rows.order[3:])]
    assert shares == [[100, 70, 20], [90, 80, 10]]


def test_worker_rebuilds_the_same_batch(batch: Batch) -> None:
    rows = Rows.dealt(batch, 1)
    again = batch_of({**rows.columns(), "temperature": 0.7})
    assert again.temperature == 0.7
    assert [item.ids for item in again.sequences] == [batch.sequences[index].ids for index in rows.order]
    assert [[(span.start, span.stop) for span in item.spans] for item in again.sequences] == [
        [(1, 3), (4, 6)],
        [(2, 4)],
        [(1, 2)],
    ]
    assert again.ids.tolist() == batch.ids[rows.tokens].tolist()
    assert again.advantages.tolist() == batch.advantages[rows.tokens].tolist()
    assert again.sequence_of.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert again.ref_logprobs is None


def test_any_batch_survives_the_round_trip() -> None:
    rng = random.Random(0)
    for _ in range(50):
        sequences = []
        for _ in range(rng.randint(1, 9)):
            ids = [rng.randrange(50) for _ in range(rng.randint(3, 30))]
            start = rng.randint(1, len(ids) - 1)
            sequences.append(sequence(ids, (start, rng.randint(start + 1, len(ids)))))
        batch = Batch.of(sequences)
        rows = Rows.dealt(batch, rng.randint(1, 4))
        columns = rows.columns()
        answers = at_tokens(next_of(columns["input_ids"]), columns[MASK])
        assert rows.back(answers).tolist() == [100.0 * token for token in batch.ids.tolist()]
