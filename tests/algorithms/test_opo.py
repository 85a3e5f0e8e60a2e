from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.reinforce import OPO

from .values import group_of

ROWS = st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 50)), min_size=2, max_size=12)
"""Each trajectory's reward and length."""


def test_long_trajectories_weigh_more_in_the_baseline() -> None:
    group = group_of(1.0, 0.0, lengths=[3, 1])
    assert OPO().baseline(group) == 0.75
    assert OPO().credit(group) == [0.25, -0.75]


def test_trajectories_without_sampled_tokens_weigh_the_same() -> None:
    assert OPO().credit(group_of(1.0, 0.0)) == [0.5, -0.5]


@given(ROWS)
def test_length_weighted_credits_sum_to_zero(rows: list[tuple[float, int]]) -> None:
    lengths = [size for _, size in rows]
    advantages = OPO().credit(group_of(*[reward for reward, _ in rows], lengths=lengths))
    assert math.fsum(a * size for a, size in zip(advantages, lengths, strict=True)) == pytest.approx(0.0, abs=1e-6)


@given(ROWS)
def test_baseline_minimizes_the_variance(rows: list[tuple[float, int]]) -> None:
    """Gradients whose squared norm is the length."""
    rewards, lengths = [reward for reward, _ in rows], [size for _, size in rows]
    best = OPO().baseline(group_of(*rewards, lengths=lengths))

    def spread(baseline: float) -> float:
        return sum(size * (reward - baseline) ** 2 for reward, size in rows)

    assert spread(best) <= min(spread(best + 0.1), spread(best - 0.1)) + 1e-6


@given(st.floats(-100, 100), st.lists(st.integers(1, 50), min_size=2, max_size=12))
def test_equal_rewards_give_exactly_zero_credit(reward: float, lengths: list[int]) -> None:
    assert OPO().credit(group_of(*[reward] * len(lengths), lengths=lengths)) == [0.0] * len(lengths)
