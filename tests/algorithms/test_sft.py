"""Supervised fine-tuning: the cross-entropy of demonstrations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.sft import SFT
from rllm.errors import ConfigError
from rllm.types import Trajectory, TrajectoryGroup

from .values import batch_of, gradient


def test_loss_is_the_mean_negative_log_likelihood() -> None:
    batch = batch_of([1.0, 1.0], [1.0])
    loss, sums = SFT().loss(torch.tensor([math.log(0.5), math.log(0.25), math.log(0.125)]), batch)
    assert loss.item() == pytest.approx((1 + 2 + 3) / 3 * math.log(2))
    assert sums["policy/nll"].item() == pytest.approx(6 * math.log(2))


def test_loss_uses_the_configured_aggregation() -> None:
    batch = batch_of([1.0, 1.0], [1.0]).with_weights("seq-mean-token-mean")
    got = gradient(lambda logprobs: SFT().loss(logprobs, batch)[0], [-1.0, -2.0, -3.0])
    assert got == pytest.approx([-1 / 4, -1 / 4, -1 / 2])


def test_gradients_equal_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64)
    targets = torch.tensor([3, 1, 4, 1, 5, 9])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    batch = batch_of([1.0] * 4, [1.0] * 2)
    batch.advantages, batch.weights = batch.advantages.double(), batch.weights.double()
    SFT().loss(ours.log_softmax(-1).gather(1, targets[:, None]).squeeze(1), batch)[0].backward()
    torch.nn.functional.cross_entropy(theirs, targets).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-8, rtol=0)


def test_unscored_demonstrations_weigh_the_same() -> None:
    group = TrajectoryGroup(trajectories=[Trajectory(reward=0.2), Trajectory()])
    assert SFT().credit(group) == [1.0, 1.0]


def test_demonstrations_have_no_sampler_logprobs() -> None:
    shown = TokenSequence(ids=[1, 2, 3], spans=[StepSpan(step_id="s", start=1, stop=3)], logprobs=None)
    batch = Batch.of([shown])
    assert (batch.ids.tolist(), batch.sampler_logprobs) == ([2, 3], None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 0.1}, r"algorithm\.clip_low=0\.1: demonstrations are not sampled"),
        ({"dual_clip": 3.0}, r"algorithm\.dual_clip=3\.0"),
        ({"level": "step"}, r"algorithm\.level='step'"),
        ({"kl_coef": 0.1}, r"algorithm\.kl_coef=0\.1"),
        ({"kl_in": "reward"}, r"algorithm\.kl_in='reward'"),
        ({"correction": "truncate"}, r"algorithm\.correction='truncate'"),
        ({"teacher_coef": 1.0}, r"algorithm\.teacher_coef=1\.0"),
    ],
)
def test_settings_without_effect_on_demonstrations_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFT(**fields)


def test_entropy_and_aggregation_are_kept() -> None:
    algorithm = SFT(entropy_coef=0.1, aggregation="seq-mean-token-sum")
    loss, _ = algorithm.loss(torch.tensor([-1.0]), batch_of([1.0]), entropy=torch.tensor([2.0]))
    assert loss.item() == pytest.approx(1.0 - 0.1 * 2.0)
