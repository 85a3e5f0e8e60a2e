from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.ppo import PPO, gae
from rllm.errors import ConfigError

from .values import batch_of, gradient

PLAIN = PPO(gamma=0.5, gae_lambda=0.5, whiten=False)
NUMBERS = st.integers(-16, 16).map(lambda number: number / 8)
TRAJECTORIES = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), min_size=1, max_size=4)
"""Each token's reward and value, by trajectory."""


def advantages_of(rewards: list[float], values: list[float], trajectory_of: list[int], **fields: float) -> list[float]:
    return gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(trajectory_of), **fields).tolist()  # type: ignore[arg-type]


def test_advantages_match_hand_computed_values() -> None:
    batch = batch_of([0.0] * 3, rewards=[0.0, 1.0, 4.0], values=[1.0, 2.0, 2.0])
    advantages, returns = PLAIN.token_advantages(batch)
    # Temporal differences: 0 + 2/2 - 1 = 0; 1 + 2/2 - 2 = 0; 4 - 2 = 2. Each step back counts a quarter.
    assert advantages.tolist() == [0.125, 0.5, 2.0]
    assert returns.tolist() == [1.125, 2.5, 4.0]


def test_advantages_do_not_cross_the_end_of_a_trajectory() -> None:
    got = advantages_of([1.0, 2.0, 4.0], [0.0, 0.0, 0.0], [0, 0, 1], gamma=1.0, gae_lambda=1.0)
    assert got == [3.0, 2.0, 4.0]


def test_advantages_continue_into_the_next_sequence_of_a_trajectory() -> None:
    batch = batch_of([0.0, 0.0], [0.0], rewards=[1.0, 2.0, 4.0], values=[0.0] * 3, trajectory_of=[0, 0, 0])
    assert PPO(gae_lambda=1.0, whiten=False).token_advantages(batch)[0].tolist() == [7.0, 6.0, 4.0]


def test_zero_gae_lambda_uses_only_the_critic() -> None:
    batch = batch_of([0.0, 0.0], rewards=[0.0, 1.0], values=[0.25, 0.5])
    assert PPO(gae_lambda=0.0, whiten=False).token_advantages(batch)[0].tolist() == [0.5 - 0.25, 1.0 - 0.5]


def flat(trajectories: list[list[tuple[float, float]]]) -> tuple[list[float], list[float], list[int]]:
    rows = [(reward, value, owner) for owner, tokens in enumerate(trajectories) for reward, value in tokens]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


@given(TRAJECTORIES, st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_advantages_equal_the_double_sum_of_the_paper(
    trajectories: list[list[tuple[float, float]]], gamma: float, gae_lambda: float
) -> None:
    expected = []
    for tokens in trajectories:
        after = [*(value for _, value in tokens[1:]), 0.0]
        surprises = [
            reward + gamma * following - value for (reward, value), following in zip(tokens, after, strict=True)
        ]
        for place in range(len(tokens)):
            expected.append(sum((gamma * gae_lambda) ** n * later for n, later in enumerate(surprises[place:])))
    assert advantages_of(*flat(trajectories), gamma=gamma, gae_lambda=gae_lambda) == pytest.approx(expected, abs=1e-5)


@given(TRAJECTORIES)
def test_exact_critic_gives_zero_advantages(trajectories: list[list[tuple[float, float]]]) -> None:
    rewards, _, owners = flat(trajectories)
    right = advantages_of(rewards, [0.0] * len(rewards), owners, gamma=0.5, gae_lambda=1.0)
    for gae_lambda in (0.0, 0.5, 1.0):
        got = advantages_of(rewards, right, owners, gamma=0.5, gae_lambda=gae_lambda)
        assert got == pytest.approx([0.0] * len(got), abs=1e-5)


def test_whitening_advantages_does_not_change_the_returns() -> None:
    batch = batch_of([0.0] * 2, [0.0], rewards=[0.0, 1.0, 3.0], values=[0.0, 0.0, 0.0])
    advantages, returns = PPO(gae_lambda=1.0).token_advantages(batch)
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 2**0.5])
    assert returns.tolist() == [1.0, 1.0, 3.0]


@given(TRAJECTORIES)
def test_whitened_advantages_have_mean_0_and_deviation_1(trajectories: list[list[tuple[float, float]]]) -> None:
    rewards, values, _ = flat(trajectories)
    batch = batch_of(*([0.0] * len(tokens) for tokens in trajectories), rewards=rewards, values=values)
    advantages, _ = PPO().token_advantages(batch)
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert advantages.std(correction=0).item() == pytest.approx(1.0, abs=1e-4) or not advantages.any()


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        # It was 1.0 before the update, and the target is 2.0; it counts up to 1.2.
        (1.1, 0.5 * 0.9**2, -0.9),
        (0.5, 0.5 * 1.5**2, -1.5),  # further off than before: not clipped
        (1.5, 0.5 * 0.8**2, 0.0),  # moved within the clip range
        (4.0, 0.5 * 2.0**2, 2.0),  # moved beyond the clip range
    ],
)
def test_critic_loss_matches_hand_computed_values(value: float, loss: float, slope: float) -> None:
    algorithm = PPO(value_coef=1.0)
    batch = batch_of([0.0], values=[1.0], returns=[2.0])
    assert algorithm.value_loss(torch.tensor([value]), batch)[0].item() == pytest.approx(loss)
    got = gradient(lambda values: algorithm.value_loss(values, batch)[0], [value])
    assert got == pytest.approx([slope])


def test_critic_loss_is_weighted_like_the_policy_loss() -> None:
    batch = batch_of([0.0, 0.0], [0.0], values=[0.0] * 3, returns=[1.0, 1.0, 3.0])
    batch = batch.with_weights("seq-mean-token-mean")
    loss, sums = PPO(value_clip=None, value_coef=0.5).value_loss(torch.zeros(3), batch)
    assert loss.item() == pytest.approx(0.5 * 0.5 * (1 / 4 + 1 / 4 + 9 / 2))
    assert sums["critic/error"].item() == 11.0
    assert sums["critic/clip_fraction"].item() == 0.0


def test_clipped_values_are_counted() -> None:
    batch = batch_of([0.0, 0.0], values=[1.0, 1.0], returns=[2.0, 2.0])
    _, sums = PPO().value_loss(torch.tensor([1.5, 1.1]), batch)
    assert sums["critic/clip_fraction"].item() == 1.0
    assert sums["critic/value"].item() == pytest.approx(2.6)


@pytest.mark.parametrize(
    "fields",
    [{"gae_lambda": 1.5}, {"gae_lambda": -0.1}, {"value_clip": 0.0}, {"value_coef": 0.0}, {"value_coef": math.inf}],
)
def test_invalid_settings_are_rejected(fields: dict[str, Any]) -> None:
    (name, value) = fields.popitem()
    with pytest.raises(ConfigError, match=rf"algorithm\.{name}={value}: use a number"):
        PPO(**{name: value})
