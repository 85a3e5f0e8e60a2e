from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.dppo import DPPO, binary_divergence
from rllm.algorithms.from_config import algorithm_of
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError

from .values import batch_of, gradient


def slopes(algorithm: DPPO, advantages: list[float], old: list[float], new: list[float]) -> list[float]:
    """Return the gradient with respect to each token's log-probability, from probabilities before and after."""
    batch = batch_of(advantages, sampler_logprobs=[math.log(each) for each in old])
    got = gradient(lambda logprobs: algorithm.loss(logprobs, batch)[0], [math.log(each) for each in new])
    return [slope * len(advantages) for slope in got]


def test_rare_tokens_may_triple_and_likely_tokens_may_not_vanish() -> None:
    old, new = [0.01, 0.9, 0.5, 0.5], [0.03, 0.7, 0.7, 0.3]
    # PPO's clip would stop the first at ratio 3, and let the second fall to 0.78.
    assert slopes(DPPO(), [1.0, -1.0, -1.0, 1.0], old, new) == pytest.approx([-3.0, 0.0, 1.4, -0.6])


def test_divergences_match_hand_computed_values() -> None:
    old, new = torch.tensor([0.5, 0.9]).log(), torch.tensor([0.25, 0.9]).log()
    assert binary_divergence(old, new, "tv").tolist() == pytest.approx([0.25, 0.0])
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert binary_divergence(old, new, "kl").tolist() == pytest.approx([by_hand, 0.0], abs=1e-6)


def test_kl_bound_stops_the_gradient() -> None:
    # 0.5 to 0.4 is 0.0204 nats, to 0.3 is 0.0872.
    algorithm = DPPO(divergence="kl", clip_low=0.05, clip_high=0.05)
    assert slopes(algorithm, [-1.0, -1.0], [0.5, 0.5], [0.4, 0.3]) == pytest.approx([0.8, 0.0])


PROBABILITY = st.floats(0.01, 0.99)


@given(st.lists(st.tuples(st.floats(-2, 2), PROBABILITY, PROBABILITY), min_size=1, max_size=6))
def test_loss_is_the_policy_gradient_within_or_without_bounds(rows: list[tuple[float, float, float]]) -> None:
    advantages, old, new = (list(column) for column in zip(*rows, strict=True))
    plain = [-advantage * after / before for advantage, before, after in rows]
    unbounded = DPPO(clip_low=1.0, clip_high=1.0, ratio_cap=100.0)
    assert slopes(unbounded, advantages, old, new) == pytest.approx(plain, rel=1e-3, abs=1e-5)
    for got, expected, (advantage, before, after) in zip(
        slopes(DPPO(ratio_cap=100.0), advantages, old, new), plain, rows, strict=True
    ):
        if abs(abs(after - before) - 0.15) > 1e-3:
            goes_on = (after - before) * advantage > 0 and abs(after - before) > 0.15
            assert got == pytest.approx(0.0 if goes_on else expected, rel=1e-3, abs=1e-5)


def test_ratio_is_capped_as_a_weight() -> None:
    assert slopes(DPPO(ratio_cap=2.0), [1.0], [0.01], [0.1]) == pytest.approx([-2.0])


def test_ratio_to_the_sampler_needs_no_staleness_correction() -> None:
    config = TrainConfig.model_validate(
        {"model": {"path": "m"}, "rollout": {"max_staleness": 2}, "algorithm": {"name": "dppo"}}
    )
    assert algorithm_of(config).correction == "none"
    with pytest.raises(ConfigError, match=r"algorithm\.correction='truncate': the ratio to the sampler is part of"):
        DPPO(correction="truncate")
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip=3\.0: dppo bounds ratios by algorithm\.ratio_cap"):
        DPPO(dual_clip=3.0)
    with pytest.raises(ConfigError, match=r"algorithm\.ratio_cap=0\.5: use at least 1"):
        DPPO(ratio_cap=0.5)
