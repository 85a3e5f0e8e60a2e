from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.grpo import CISPO
from rllm.errors import ConfigError

from .values import batch_of, gradient

TOKENS = st.lists(st.tuples(st.floats(-2, 2), st.floats(-3, 3)), min_size=1, max_size=8)
"""Each token's advantage, and the change of its log-probability."""


def test_weights_are_bounded_and_gradients_are_kept() -> None:
    batch = batch_of([1.0, 1.0, -1.0], old_logprobs=[-3.0] * 3)
    moved = [-3.0 + math.log(2.0), -3.0 + math.log(9.0), -3.0 + math.log(9.0)]
    losses, sums = CISPO().surrogate(torch.tensor(moved), torch.tensor([-3.0] * 3), batch)
    assert losses.tolist() == pytest.approx([-2.0 * moved[0], -5.0 * moved[1], 5.0 * moved[2]])
    assert sums["policy/clip_fraction"].item() == 2.0
    assert sums["policy/ratio"].item() == pytest.approx(20.0)
    got = gradient(lambda logprobs: CISPO().loss(logprobs, batch)[0] * 3, moved)
    assert got == pytest.approx([-2.0, -5.0, 5.0])


def test_lower_bound_can_be_set() -> None:
    batch = batch_of([1.0], old_logprobs=[0.0])
    assert gradient(lambda logprobs: CISPO(clip_low=0.2).loss(logprobs, batch)[0], [-3.0]) == pytest.approx([-0.8])


@given(TOKENS)
def test_gradient_is_weighted_by_the_bounded_ratio(tokens: list[tuple[float, float]]) -> None:
    moved = [change for _, change in tokens]
    batch = batch_of([advantage for advantage, _ in tokens], old_logprobs=[0.0] * len(tokens))
    expected = [-advantage * min(math.exp(change), 5.0) / len(tokens) for advantage, change in tokens]
    assert gradient(lambda logprobs: CISPO().loss(logprobs, batch)[0], moved) == pytest.approx(expected, abs=1e-5)


def test_second_bound_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.dual_clip=9\.0: cispo bounds all weights by algorithm\.clip_high"
    ):
        CISPO(dual_clip=9.0)
