from __future__ import annotations

import pytest
import torch

from rllm.algorithms.batch import Aggregation, Batch
from rllm.backends.update import minibatches

from .conftest import sequence_of


@pytest.mark.parametrize(
    ("aggregation", "fixed_length", "weights"),
    [
        ("token-mean", None, [[1 / 4] * 4, [1 / 2] * 2]),
        ("seq-mean-token-mean", None, [[1 / 6] * 3 + [1 / 2], [1 / 2] * 2]),
        ("seq-mean-token-sum", None, [[1 / 2] * 4, [1 / 2] * 2]),
        ("fixed-length", 10, [[1 / 20] * 4, [1 / 20] * 2]),
    ],
)
def test_each_minibatch_has_its_own_mean(
    aggregation: Aggregation, fixed_length: int | None, weights: list[list[float]]
) -> None:
    answers = [[2, 3, 4], [5], [6], [7]]
    batch = Batch.of([sequence_of([1], answer) for answer in answers]).with_weights(aggregation, fixed_length)
    parts = minibatches(batch, aggregation, num_minibatches=2, num_epochs=2)
    assert [(part.weights * scale).tolist() for part, scale in parts] == [pytest.approx(row) for row in weights * 2]


def test_sequences_of_a_trajectory_may_be_in_several_minibatches() -> None:
    """Three of its four tokens are in the first minibatch, with another trajectory's; the last is alone in the second."""
    batch = Batch.of([sequence_of([1], answer) for answer in ([2], [3, 4, 5], [6])])
    batch.trajectory_of = torch.tensor([0, 1, 1, 1, 1])
    batch = batch.with_weights("trajectory-mean-token-mean")
    parts = list(minibatches(batch, "trajectory-mean-token-mean", num_minibatches=3, num_epochs=1))
    assert [(part.weights * scale).tolist() for part, scale in parts] == [[1.0], pytest.approx([1 / 3] * 3), [1.0]]
    [(whole, scale)] = minibatches(batch, "trajectory-mean-token-mean", num_minibatches=1, num_epochs=1)
    assert (scale, whole.weights.tolist()) == (1.0, pytest.approx([1 / 2, *[1 / 8] * 4]))


def test_weights_of_minibatches_count_truncated_tokens() -> None:
    """Two of four sequences have no advantage, so each minibatch has half of the value that it would have otherwise."""
    answers = [[2, 3, 4], [5], [6, 7], [8, 9]]
    whole = Batch.of([sequence_of([1], answer) for answer in answers]).with_weights("seq-mean-token-sum")
    batch = whole.select([0, 1])
    parts = minibatches(batch, "seq-mean-token-sum", num_minibatches=2, num_epochs=1)
    assert [(part.weights * scale).tolist() for part, scale in parts] == [[0.5] * 3, [0.5]]
