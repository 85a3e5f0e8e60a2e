from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.grpo import GSPO
from rllm.errors import ConfigError

from .values import batch_of, gradient

WIDE = GSPO(clip_low=0.2, clip_high=0.2)


def test_sequence_ratio_is_the_geometric_mean_of_token_ratios() -> None:
    batch = batch_of([1.0, 1.0], [1.0], old_logprobs=[-1.0, -1.0, -2.0])
    logprobs = torch.tensor([-1.0 + math.log(1.21), -1.0, -2.0])
    losses, sums = WIDE.surrogate(logprobs, torch.tensor([-1.0, -1.0, -2.0]), batch)
    assert losses.tolist() == pytest.approx([-1.1, -1.1, -1.0])
    assert sums["policy/ratio"].item() == pytest.approx(3.2)


def test_sequences_are_clipped_as_a_whole() -> None:
    batch = batch_of([1.0, 1.0], [1.0, 1.0], old_logprobs=[0.0] * 4)
    moved = [math.log(2.0), 0.0, math.log(1.3), -math.log(1.3)]  # ratios 1.41 and 1
    losses, sums = WIDE.surrogate(torch.tensor(moved), torch.zeros(4), batch)
    assert losses.tolist() == pytest.approx([-1.2, -1.2, -1.0, -1.0])
    assert sums["policy/clip_fraction"].item() == 2.0
    got = gradient(lambda logprobs: WIDE.surrogate(logprobs, torch.zeros(4), batch)[0].sum(), moved)
    assert got == pytest.approx([0.0, 0.0, -1.0, -1.0])


SEQUENCES = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=5)), min_size=1, max_size=4
)
"""Each sequence's advantage, and the changes of its tokens' log-probabilities."""


@given(SEQUENCES)
def test_loss_and_gradient_equal_the_sequence_form_of_the_paper(sequences: list[tuple[float, list[float]]]) -> None:
    """The mean over sequences of `min(s A, clip(s) A)`, with the gradient through s itself."""
    moved = [change for _, changes in sequences for change in changes]
    batch = batch_of(*([advantage] * len(changes) for advantage, changes in sequences), old_logprobs=[0.0] * len(moved))
    batch = batch.with_weights(WIDE.aggregation)

    def plain(logprobs: torch.Tensor) -> torch.Tensor:
        gains, place = [], 0
        for advantage, changes in sequences:
            ratio = logprobs[place : place + len(changes)].mean().exp()
            gains.append(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            place += len(changes)
        return -torch.stack(gains).mean()

    assert WIDE.loss(torch.tensor(moved), batch)[0].item() == pytest.approx(plain(torch.tensor(moved)).item(), abs=1e-5)
    got = gradient(lambda logprobs: WIDE.loss(logprobs, batch)[0], moved)
    assert got == pytest.approx(gradient(plain, moved), abs=1e-5)


def test_defaults_are_those_of_the_paper_and_dual_clip_is_rejected() -> None:
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip=3\.0: gspo has no such bound"):
        GSPO(dual_clip=3.0)
