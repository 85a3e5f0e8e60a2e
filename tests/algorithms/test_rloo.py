from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.reinforce import RLOO

from .values import group_of


def test_baseline_is_the_mean_of_the_other_rewards() -> None:
    assert RLOO().credit(group_of(1.0, 0.0)) == [1.0, -1.0]
    assert RLOO().credit(group_of(1.0, 0.0, 0.5)) == pytest.approx([0.75, -0.75, 0.0])
    assert RLOO().baseline(group_of(1.0, 0.0, 0.5)) == 0.5


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_credits_equal_those_of_a_leave_one_out_loop(rewards: list[float]) -> None:
    plain = [reward - mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    assert RLOO().credit(group_of(*rewards)) == pytest.approx(plain, abs=1e-9)


@given(st.floats(-100, 100), st.integers(2, 12))
def test_equal_rewards_give_exactly_zero_credit(reward: float, size: int) -> None:
    assert RLOO().credit(group_of(*[reward] * size)) == [0.0] * size


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.floats(-100, 100))
def test_credits_sum_to_zero_and_ignore_a_constant_bonus(rewards: list[float], bonus: float) -> None:
    advantages = RLOO().credit(group_of(*rewards))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert RLOO().credit(group_of(*[reward + bonus for reward in rewards])) == pytest.approx(advantages, abs=1e-9)
