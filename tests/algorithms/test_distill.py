"""On-policy distillation: the advantage of a token is the teacher's log-probability minus the policy's."""

from __future__ import annotations

import math

import pytest
import torch

from rllm.algorithms.distill import Distill
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.losses import pull_of_teacher
from rllm.algorithms.ppo import PPO
from rllm.errors import ConfigError

from .values import batch_of, gradient, group_of


def test_teacher_advantage_is_the_bounded_difference_of_logprobs() -> None:
    own, teacher = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25, -4.0, -math.inf])
    assert pull_of_teacher(own, teacher).tolist() == [0.75, -2.0, -20.0]


def test_gradient_step_lowers_the_reverse_divergence() -> None:
    """In expectation over the policy's own tokens, the loss has the gradient of KL(policy || teacher)."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(0)
    own = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((own.exp() * (own - teacher)).sum(), logits, retain_graph=True)
    batch = batch_of([0.0] * 7)
    batch.advantages, batch.weights = pull_of_teacher(own.detach(), teacher), own.detach().exp()
    loss, _ = Distill().loss(own, batch)
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, wanted)


def test_divergence_is_reported() -> None:
    batch = batch_of([0.0, 0.0], teacher_logprobs=[-0.5, -4.0], old_logprobs=[-1.0, -2.0])
    _, sums = Distill().loss(torch.tensor([-1.5, -1.5]), batch)
    assert sums["policy/teacher_kl"].item() == pytest.approx(-0.5 + 2.0)


def test_rewards_are_ignored() -> None:
    assert Distill().credit(group_of(1.0, 0.0)) == [0.0, 0.0]
    assert not Distill().needs_rewards


def test_any_algorithm_can_have_a_teacher() -> None:
    for algorithm in (Distill(), GRPO(teacher_coef=0.1), PPO(teacher_coef=0.1)):
        assert algorithm.needs_teacher
        assert algorithm.learns_without_advantage, "groups with equal rewards still learn from the teacher"
    assert not GRPO().needs_teacher


def test_gradient_is_zero_without_teacher() -> None:
    assert gradient(lambda logprobs: Distill().loss(logprobs, batch_of([0.0]))[0], [-1.0]) == [0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher_coef": 0.0}, r"algorithm\.teacher_coef=0\.0: use a number above 0"),
        ({"teacher_coef": -1.0}, r"algorithm\.teacher_coef=-1\.0"),
        ({"level": "step"}, r"algorithm\.level='step': distill ignores rewards"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, r"algorithm\.kl_in='reward': distill ignores rewards"),
    ],
)
def test_invalid_settings_are_rejected(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Distill(**fields)  # type: ignore[arg-type]
