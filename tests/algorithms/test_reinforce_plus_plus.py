from __future__ import annotations

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline

from .values import batch_of, group_of

REWARDS = st.integers(-16, 16).map(lambda number: number / 8)


def test_credit_of_a_token_is_its_whitened_return() -> None:
    batch = batch_of([0.0, 0.0], [0.0], rewards=[-0.5, 1.0, -1.0])
    advantages, returns = ReinforcePlusPlus(gamma=0.5).token_advantages(batch)
    # Returns 0, 1 and -1 have mean 0 and deviation sqrt(2/3).
    assert advantages.tolist() == pytest.approx([0.0, 1.5**0.5, -(1.5**0.5)])
    assert returns is None


@given(st.lists(st.lists(REWARDS, min_size=1, max_size=5), min_size=1, max_size=5), st.sampled_from([0.5, 1.0]))
def test_credits_equal_those_of_a_loop(trajectories: list[list[float]], gamma: float) -> None:
    returns = [
        sum(gamma**n * reward for n, reward in enumerate(rewards[place:]))
        for rewards in trajectories
        for place in range(len(rewards))
    ]
    mean = math.fsum(returns) / len(returns)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in returns) / len(returns))
    batch = batch_of(*([0.0] * len(rewards) for rewards in trajectories), rewards=list(chain(*trajectories)))
    advantages, _ = ReinforcePlusPlus(gamma=gamma).token_advantages(batch)
    assert advantages.tolist() == pytest.approx([(value - mean) / (deviation + 1e-8) for value in returns], abs=1e-4)


def test_equal_rewards_give_exactly_zero_credit() -> None:
    batch = batch_of([0.0] * 7, [0.0] * 3, rewards=[*[0.0] * 6, 0.1, 0.0, 0.0, 0.1])
    assert ReinforcePlusPlus().token_advantages(batch)[0].tolist() == [0.0] * 10


def test_baseline_variant_is_scaled_by_the_batch() -> None:
    groups = [group_of(1.0, 0.0, lengths=[1, 1]), group_of(5.0, 2.0, lengths=[1, 1])]
    # Distances 0.5, -0.5, 1.5, -1.5 have mean 0 and deviation sqrt(5 / 4).
    expected = [[value / 1.25**0.5 for value in row] for row in ([0.5, -0.5], [1.5, -1.5])]
    for got, right in zip(ReinforcePlusPlusBaseline().credits(groups), expected, strict=True):
        assert got == pytest.approx(right)
    assert [ReinforcePlusPlusBaseline().baseline(group) for group in groups] == [0.5, 3.5]


def test_long_trajectories_weigh_more_in_the_mean_and_deviation() -> None:
    (advantages,) = ReinforcePlusPlusBaseline().credits([group_of(1.0, 0.0, lengths=[3, 1])])
    # Of four tokens three have 0.5 and one -0.5: mean 0.25, deviation sqrt(3) / 4.
    assert advantages == pytest.approx([0.25 / (3**0.5 / 4), -0.75 / (3**0.5 / 4)])


@given(st.lists(st.lists(st.tuples(REWARDS, st.integers(1, 4)), min_size=2, max_size=4), min_size=1, max_size=4))
def test_credits_sum_to_zero_over_all_tokens(groups: list[list[tuple[float, int]]]) -> None:
    made = [group_of(*[reward for reward, _ in rows], lengths=[size for _, size in rows]) for rows in groups]
    advantages = ReinforcePlusPlusBaseline().credits(made)
    pairs = zip(chain(*advantages), [size for rows in groups for _, size in rows], strict=True)
    assert math.fsum(advantage * size for advantage, size in pairs) == pytest.approx(0.0, abs=1e-6)


def test_groups_of_equal_rewards_give_exactly_zero_credit() -> None:
    groups = [group_of(0.1, 0.1, lengths=[2, 3]), group_of(0.7, 0.7, lengths=[1, 5])]
    assert ReinforcePlusPlusBaseline().credits(groups) == [[0.0, 0.0], [0.0, 0.0]]


def test_trajectory_without_tokens_counts_as_one_token() -> None:
    algorithm = ReinforcePlusPlusBaseline()
    without, single = group_of(1.0, 0.0, 2.0, lengths=[2, 1, 0]), group_of(1.0, 0.0, 2.0, lengths=[2, 1, 1])
    assert algorithm.credits([without]) == algorithm.credits([single])


def test_empty_list_of_groups_has_no_credits() -> None:
    assert ReinforcePlusPlusBaseline().credits([]) == []
