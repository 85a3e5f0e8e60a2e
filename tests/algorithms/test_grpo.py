from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import EPSILON, GRPO
from rllm.errors import ConfigError
from rllm.types import Trajectory, TrajectoryGroup

REWARDS = st.floats(-1e3, 1e3)


def group_of(*rewards: float) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[Trajectory(reward=reward) for reward in rewards])


def test_without_normalisation_the_credit_is_the_distance_from_the_mean() -> None:
    assert GRPO(normalize_std=False).credit(group_of(1.0, 0.0)) == [0.5, -0.5]
    assert GRPO(normalize_std=False).credit(group_of(1.0, 0.0, 0.0, 0.0)) == [0.75, -0.25, -0.25, -0.25]


def test_normalised_credit_is_in_population_standard_deviations() -> None:
    assert GRPO().credit(group_of(1.0, 0.0)) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert GRPO().credit(group_of(1.0, 0.0, 0.0, 0.0)) == pytest.approx([3**0.5] + [-(3**-0.5)] * 3, abs=1e-5)
    assert GRPO().credit(group_of(3.0, 1.0)) == [1 / (1 + EPSILON), -1 / (1 + EPSILON)]


def test_the_baseline_is_the_mean() -> None:
    assert GRPO().baseline(group_of(1.0, 0.0, 0.5)) == 0.5


@given(REWARDS, st.integers(2, 16))
def test_equal_rewards_teach_exactly_nothing(reward: float, size: int) -> None:
    assert GRPO().credit(group_of(*[reward] * size)) == [0.0] * size


@given(st.lists(REWARDS, min_size=2, max_size=16), st.booleans())
def test_credits_of_a_group_cancel_and_keep_the_order_of_rewards(rewards: list[float], normalize_std: bool) -> None:
    advantages = GRPO(normalize_std=normalize_std).credit(group_of(*rewards))
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, advantages))))
    ranked = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(advantages)


def batch_of(advantages: list[float], old: list[float] | None = None) -> Batch:
    """One sequence of as many sampled tokens."""
    span = StepSpan(step_id="s", start=1, stop=1 + len(advantages))
    ids = list(range(1 + len(advantages)))
    batch = Batch.of([TokenSequence(ids=ids, spans=[span], logprobs=[-1.0] * len(advantages))])
    batch.advantages = torch.tensor(advantages)
    batch.old_logprobs = None if old is None else torch.tensor(old)
    return batch


def test_on_the_first_update_the_gradient_is_the_policy_gradient() -> None:
    batch = batch_of([2.0, -1.0])
    logprobs = torch.tensor([-0.3, -4.0], requires_grad=True)
    loss, sums = GRPO().loss(logprobs, batch)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5), "minus the mean advantage: all ratios are one"
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.5]
    assert {name: value.item() for name, value in sums.items()} == {"policy/clip_fraction": 0.0, "policy/ratio": 2.0}


def naive_loss(logprobs: list[torch.Tensor], batch: Batch, low: float, high: float) -> torch.Tensor:
    """PPO's objective, token by token, as the paper writes it."""
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
    batch = batch_of([advantage for advantage, _, _ in tokens], [old for _, old, _ in tokens])
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


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan])
def test_a_clip_range_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.clip_low="):
        GRPO(clip_low=value)


def test_an_algorithm_without_credit_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="must define credit"):
        Algorithm().credit(group_of(1.0))
