from __future__ import annotations

from math import comb, fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.maxrl import MaxRL
from rllm.errors import ConfigError

from .values import group_of


def test_rare_success_has_more_weight() -> None:
    assert MaxRL().credit(group_of(1.0, 0.0, 0.0, 0.0)) == [3.0, -1.0, -1.0, -1.0]
    assert MaxRL().credit(group_of(1.0, 1.0, 1.0, 0.0)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert MaxRL().baseline(group_of(1.0, 0.0)) == 0.5


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_exactly_zero_credit(reward: float) -> None:
    assert MaxRL().credit(group_of(*[reward] * 3)) == [0.0] * 3


@given(st.floats(0.02, 0.98), st.integers(2, 8))
def test_expected_gradient_equals_that_of_a_truncated_log_likelihood(chance: float, size: int) -> None:
    """A policy with success rate p: its score is 1 / p on success and -1 / (1 - p) on failure."""

    def gradient(successes: int) -> float:
        group = group_of(*[1.0] * successes, *[0.0] * (size - successes))
        scores = [1 / chance] * successes + [-1 / (1 - chance)] * (size - successes)
        return fsum(a * score for a, score in zip(MaxRL().credit(group), scores, strict=True)) / size

    counts = range(size + 1)
    expected = fsum(comb(size, k) * chance**k * (1 - chance) ** (size - k) * gradient(k) for k in counts)
    # log p = -sum of (1 - p)^k / k, so its derivative is the sum of (1 - p)^(k - 1)
    assert expected == pytest.approx(fsum((1 - chance) ** (k - 1) for k in range(1, size)), rel=1e-6)


def test_negative_rewards_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"rewards \[1\.0, -1\.0\] of group 'g': algorithm\.name=maxrl divides by"):
        MaxRL().credit(group_of(1.0, -1.0, group_id="g"))
    with pytest.raises(ConfigError, match=r"algorithm\.kl_in='reward': it can make rewards negative"):
        MaxRL(kl_coef=0.1, kl_in="reward")
