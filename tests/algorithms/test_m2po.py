from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.m2po import M2PO
from rllm.errors import ConfigError

from .values import batch_of, gradient

TOKENS = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5]), st.integers(-16, 16)), min_size=1, max_size=12)
"""Each token's advantage, and the distance of its log-probability from its sampler's in sixteenths."""


def test_largest_ratios_are_masked_until_the_bound_is_met() -> None:
    # Changes in the direction of the advantage: 0.1, 0.3, -0.4, 0.2. Mean squares, by size: 0.01, 0.025, 0.0467, 0.075.
    batch = batch_of([1.0, 1.0, -1.0, 1.0, 1.0, -1.0], sampler_logprobs=[-2.0] * 6)
    moved = torch.tensor([-1.9, -1.7, -2.4, -1.8, -2.9, -1.1])
    masked, sums = M2PO().masked(batch, moved)
    assert masked.advantages.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, -1.0]
    assert sums["policy/clip_fraction"].item() == 2.0
    assert M2PO(threshold=0.05).masked(batch, moved)[0].advantages.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, -1.0]
    assert M2PO(threshold=0.08).masked(batch, moved)[0].advantages.tolist() == batch.advantages.tolist()


@given(TOKENS, st.floats(0.01, 0.5))
def test_second_moment_is_bounded_with_the_fewest_masked_tokens(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    batch = batch_of([advantage for advantage, _ in tokens], sampler_logprobs=[-3.0] * len(tokens))
    moves = torch.tensor([move / 16 for _, move in tokens])
    kept = M2PO(threshold=threshold).masked(batch, moves - 3.0)[0].advantages != 0
    pushes = moves * batch.advantages > 0
    assert kept[~pushes].equal(batch.advantages[~pushes] != 0)
    moments = moves.square()
    if (kept & pushes).any():
        assert moments[kept & pushes].mean() <= threshold + 1e-6
    if (dropped := pushes & ~kept).any():
        smallest = moments[dropped].min()
        assert not (kept & pushes).any() or smallest >= moments[kept & pushes].max() - 1e-6
        assert torch.cat([moments[kept & pushes], smallest[None]]).mean() > threshold - 1e-6


@given(TOKENS)
def test_loss_is_the_plain_ratio_to_the_sampler(tokens: list[tuple[float, float]]) -> None:
    batch = batch_of([advantage for advantage, _ in tokens], sampler_logprobs=[0.0] * len(tokens))
    expected = [-advantage * math.exp(move / 16) / len(tokens) for advantage, move in tokens]
    got = gradient(lambda logprobs: M2PO().loss(logprobs, batch)[0], [move / 16 for _, move in tokens])
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.threshold=0\.0: use a number above 0"):
        M2PO(threshold=0.0)
    with pytest.raises(ConfigError, match=r"algorithm\.clip_high=0\.1: m2po masks by algorithm\.threshold"):
        M2PO(clip_high=0.1)
    with pytest.raises(ConfigError, match=r"algorithm\.correction='mask'"):
        M2PO(correction="mask")
