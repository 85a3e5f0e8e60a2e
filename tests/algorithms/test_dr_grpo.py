from __future__ import annotations

import pytest
import torch

from rllm.algorithms.grpo import DrGRPO
from rllm.errors import ConfigError

from .values import batch_of, group_of


def test_credit_is_the_distance_from_the_mean() -> None:
    assert DrGRPO(fixed_length=8).credit(group_of(1.0, 0.0, 0.0, 0.0)) == [0.75, -0.25, -0.25, -0.25]


def test_loss_is_divided_by_the_fixed_length() -> None:
    algorithm = DrGRPO(fixed_length=8)
    batch = batch_of([1.0, 1.0, 1.0], [-1.0]).with_weights(algorithm.aggregation, algorithm.fixed_length)
    loss, _ = algorithm.loss(torch.zeros(4), batch)
    assert loss.item() == pytest.approx(-(3 - 1) / (2 * 8)), "each token counts 1 / (sequences x fixed length)"


def test_fixed_length_is_required() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.fixed_length=None: .*use the value of rollout\.max_tokens"):
        DrGRPO()
