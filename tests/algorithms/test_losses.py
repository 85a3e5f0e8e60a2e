from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.losses import (
    KLEstimator,
    clipped_policy_loss,
    importance_weights,
    kl_divergence,
    mean_by_sequence,
    probability_ratio,
    whitened,
)

from .values import gradient

ESTIMATORS: list[KLEstimator] = ["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        # A good token: its gain stops growing above 1 + clip_high, and nothing else is limited.
        (0.5, 2.0, -1.0, False),
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.6, True),
        # A bad token: its loss stops falling below 1 - clip_low, and nothing else is limited.
        (0.5, -2.0, 1.6, True),
        (0.9, -2.0, 1.8, False),
        (1.0, -2.0, 2.0, False),
        (1.5, -2.0, 3.0, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clipped_loss_matches_hand_computed_values(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    old = torch.tensor([-3.0])
    losses, ratios, where = clipped_policy_loss(
        old + math.log(ratio), old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3
    )
    assert losses.item() == pytest.approx(loss, abs=1e-6)
    assert ratios.item() == pytest.approx(ratio)
    assert where.item() is clipped


def test_gradient_is_zero_where_the_loss_is_clipped() -> None:
    old = torch.zeros(4)
    logprobs = torch.log(torch.tensor([0.5, 1.5, 0.5, 1.5])).requires_grad_()
    losses, _, _ = clipped_policy_loss(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.0, 0.0, 1.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.9, -1.0, 2.9, 2.9),
        (5.0, -1.0, 3.0, 0.0),  # not pushed further down
        (5.0, 1.0, -1.2, 0.0),  # a good token: clipped as usual
        (5.0, 0.5, -0.6, 0.0),
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    def losses(logprobs: torch.Tensor) -> torch.Tensor:
        settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
        return clipped_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), **settings)[0].sum()

    assert losses(torch.tensor([math.log(ratio)])).item() == pytest.approx(loss)
    assert gradient(losses, [math.log(ratio)]) == pytest.approx([slope])


def test_ratios_are_finite() -> None:
    assert probability_ratio(torch.tensor([-1.0, -1000.0]), torch.tensor([-1000.0, -1.0])).isfinite().all()
    losses, _, _ = clipped_policy_loss(
        torch.tensor([-1.0]), torch.tensor([-1000.0]), torch.tensor([0.0]), clip_low=0.2, clip_high=0.2
    )
    assert losses.tolist() == [0.0], "0 * inf would be nan"


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_divergence_matches_hand_computed_values(estimator: KLEstimator, value: float) -> None:
    """The divergence of a token that is twice as likely as under the reference."""
    logprob = torch.tensor([math.log(0.5)])
    assert kl_divergence(logprob, logprob - math.log(2), estimator).item() == pytest.approx(value)


LOGITS = st.lists(st.floats(-2, 2), min_size=3, max_size=3)


@given(LOGITS, LOGITS, st.sampled_from(ESTIMATORS))
def test_expected_gradient_equals_that_of_the_divergence(
    policy: list[float], reference: list[float], estimator: KLEstimator
) -> None:
    """A vocabulary of three, whose expectation over sampled tokens is a sum."""
    ref_logprobs = torch.tensor(reference).log_softmax(0)

    def exact(logits: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(0)
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum()

    def estimated(logits: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(0)
        return (logprobs.exp().detach() * kl_divergence(logprobs, ref_logprobs, estimator)).sum()

    assert gradient(estimated, policy) == pytest.approx(gradient(exact, policy), abs=1e-5)
    if estimator != "k2":
        at = torch.tensor(policy)
        assert estimated(at).item() == pytest.approx(exact(at).item(), abs=1e-5), "the estimate is unbiased"


def test_each_token_gets_the_mean_of_its_sequence() -> None:
    means = mean_by_sequence(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]))
    assert means.tolist() == [1.5, 1.5, 6.0]
    assert mean_by_sequence(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def test_importance_weights_match_hand_computed_values() -> None:
    trainer, sampler = torch.tensor([4.0, 1.0, 0.25]).log(), torch.zeros(3)
    rows = torch.tensor([0, 0, 1])

    def weights(level: str, cap: float, mode: str) -> list[float]:
        return importance_weights(trainer, sampler, rows, level=level, cap=cap, mode=mode).tolist()  # type: ignore[arg-type]

    assert weights("token", 2.0, "truncate") == pytest.approx([2.0, 1.0, 0.25])
    assert weights("token", 2.0, "mask") == pytest.approx([0.0, 1.0, 0.0])
    assert weights("sequence", 3.0, "truncate") == pytest.approx([2.0, 2.0, 0.25])
    assert weights("sequence", 3.0, "mask") == pytest.approx([2.0, 2.0, 0.0])


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    assert whitened(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-1.0, 1.0])
    assert whitened(torch.tensor([0.1] * 1000)).tolist() == [0.0] * 1000
    assert whitened(torch.zeros(0)).tolist() == []


@given(st.lists(st.integers(-100, 100), min_size=2, max_size=10), st.integers(-100, 100), st.integers(1, 8))
def test_whitening_removes_shift_and_scale(values: list[int], shift: int, scale: int) -> None:
    moved = whitened(torch.tensor([scale * value + shift for value in values]).float())
    assert moved.tolist() == pytest.approx(whitened(torch.tensor(values).float()).tolist(), abs=1e-5)
