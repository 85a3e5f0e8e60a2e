from __future__ import annotations

import math

import pytest
import torch

from rllm.algorithms.losses import clipped_policy_loss


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
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    old = torch.tensor([-3.0])
    losses, ratios, where = clipped_policy_loss(
        old + math.log(ratio), old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3
    )
    assert losses.item() == pytest.approx(loss, abs=1e-6)
    assert ratios.item() == pytest.approx(ratio)
    assert where.item() is clipped


def test_the_gradient_stops_where_the_loss_is_clipped() -> None:
    old = torch.zeros(4)
    logprobs = torch.log(torch.tensor([0.5, 1.5, 0.5, 1.5])).requires_grad_()
    losses, _, _ = clipped_policy_loss(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.0, 0.0, 1.5])
