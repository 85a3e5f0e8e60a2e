from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.sapo import SAPO
from rllm.errors import ConfigError

from .values import batch_of, gradient

HARD = SAPO(positive_temperature=2.0, negative_temperature=4.0)


def slope(algorithm: SAPO, advantage: float, ratio: float) -> float:
    batch = batch_of([advantage], old_logprobs=[-3.0])
    return gradient(lambda logprobs: algorithm.loss(logprobs, batch)[0], [-3.0 + math.log(ratio)])[0]


def test_loss_and_gradient_match_hand_computed_values() -> None:
    batch = batch_of([1.0, -1.0], old_logprobs=[-3.0, -3.0])
    moved = torch.tensor([-3.0 + math.log(1.5), -3.0 + math.log(0.5)])
    losses, sums = HARD.surrogate(moved, torch.tensor([-3.0, -3.0]), batch)
    # sigmoid(2 * 0.5) * 2 = 1.4621; sigmoid(4 * -0.5) = 0.1192
    assert losses.tolist() == pytest.approx([-1.4621, 0.1192], abs=1e-4)
    assert sums["policy/ratio"].item() == pytest.approx(2.0)
    # 4 p (1 - p) r: 4 * 0.7311 * 0.2689 * 1.5 and 4 * 0.1192 * 0.8808 * 0.5
    assert slope(HARD, 1.0, 1.5) == pytest.approx(-1.1797, abs=1e-4)
    assert slope(HARD, -1.0, 0.5) == pytest.approx(0.2100, abs=1e-4)


@given(st.floats(-2, 2).filter(lambda advantage: abs(advantage) > 1e-3), st.floats(0.05, 20))
def test_low_temperature_gives_the_plain_ratio_and_higher_ones_fade(advantage: float, ratio: float) -> None:
    soft = SAPO(positive_temperature=1e-3, negative_temperature=1e-3)
    assert slope(soft, advantage, ratio) == pytest.approx(-advantage * ratio, rel=1e-2)
    assert abs(slope(HARD, advantage, ratio)) <= abs(slope(SAPO(), advantage, ratio)) + 1e-6
    assert abs(slope(SAPO(), advantage, ratio)) <= abs(advantage) * ratio + 1e-6


def test_invalid_settings_are_rejected() -> None:
    assert SAPO().aggregation == "seq-mean-token-mean"
    for name, value in {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 3.0}.items():
        with pytest.raises(ConfigError, match=rf"algorithm\.{name}={value}: sapo has a gate instead"):
            SAPO(**{name: value})
    with pytest.raises(ConfigError, match=r"algorithm\.negative_temperature=0\.0: use a number above 0"):
        SAPO(negative_temperature=0.0)
