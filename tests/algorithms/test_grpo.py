from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import EPSILON, GRPO

from .values import batch_of, group_of

REWARDS = st.floats(-1e3, 1e3)


def test_unnormalized_credit_is_the_distance_from_the_mean() -> None:
    assert GRPO(normalize_std=False).credit(group_of(1.0, 0.0)) == [0.5, -0.5]
    assert GRPO(normalize_std=False).credit(group_of(1.0, 0.0, 0.0, 0.0)) == [0.75, -0.25, -0.25, -0.25]


def test_normalized_credit_uses_the_population_standard_deviation() -> None:
    assert GRPO().credit(group_of(1.0, 0.0)) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert GRPO().credit(group_of(1.0, 0.0, 0.0, 0.0)) == pytest.approx([3**0.5] + [-(3**-0.5)] * 3, abs=1e-5)
    assert GRPO().credit(group_of(3.0, 1.0)) == [1 / (1 + EPSILON), -1 / (1 + EPSILON)]


def test_baseline_is_the_mean() -> None:
    assert GRPO().baseline(group_of(1.0, 0.0, 0.5)) == 0.5


@given(REWARDS, st.integers(2, 16))
def test_equal_rewards_give_exactly_zero_credit(reward: float, size: int) -> None:
    assert GRPO().credit(group_of(*[reward] * size)) == [0.0] * size


@given(st.lists(REWARDS, min_size=2, max_size=16), st.booleans())
def test_credits_of_a_group_sum_to_zero_in_the_order_of_rewards(rewards: list[float], normalize_std: bool) -> None:
    advantages = GRPO(normalize_std=normalize_std).credit(group_of(*rewards))
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, advantages))))
    ranked = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(advantages)


def test_gradient_of_the_first_update_is_the_policy_gradient() -> None:
    batch = batch_of([2.0, -1.0])
    logprobs = torch.tensor([-0.3, -4.0], requires_grad=True)
    loss, sums = GRPO().loss(logprobs, batch)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5), "minus the mean advantage: all ratios are one"
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.5]
    assert {name: value.item() for name, value in sums.items()} == {
        "policy/clip_fraction": 0.0,
        "policy/ratio": 2.0,
        "policy/update_kl": 0.0,
    }


def naive_loss(logprobs: list[torch.Tensor], batch: Batch, low: float, high: float) -> torch.Tensor:
    """Return PPO's objective, token by token, as in the paper."""
    assert batch.old_logprobs is not None
    total = torch.tensor(0.0)
    for place, logprob in enumerate(logprobs):
        ratio = torch.exp(logprob - batch.old_logprobs[place])
        advantage = batch.advantages[place]
        gain = torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
        total = total - batch.weights[place] * gain
    return total


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-3, -0.1), st.floats(-0.6, 0.6)), min_size=1, max_size=8))
def test_loss_and_gradient_equal_a_loop_over_tokens(tokens: list[tuple[float, float, float]]) -> None:
    batch = batch_of([advantage for advantage, _, _ in tokens], old_logprobs=[old for _, old, _ in tokens])
    values = [old + change for _, old, change in tokens]
    logprobs = torch.tensor(values, requires_grad=True)
    one_by_one = [torch.tensor(value, requires_grad=True) for value in values]
    loss, _ = GRPO(clip_low=0.1, clip_high=0.3).loss(logprobs, batch)
    expected = naive_loss(one_by_one, batch, 0.1, 0.3)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [0.0 if item.grad is None else item.grad.item() for item in one_by_one], abs=1e-6
    )
