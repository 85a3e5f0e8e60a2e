from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.batch import Batch
from rllm.algorithms.otb import OTB

from .values import batch_of


def credited(
    rewards: list[float], energies: list[list[float]], groups: list[int] | None = None, **fields: float
) -> list[list[float]]:
    """Return the advantages of trajectories with these energies per token, whose reward is at the last token."""
    batch: Batch = batch_of(*([0.0] * len(row) for row in energies))
    batch.group_of = torch.tensor(groups or [0] * len(rewards))[batch.sequence_of]
    batch.energies = torch.tensor([value for row in energies for value in row])
    earned = [[0.0] * (len(row) - 1) + [reward] for row, reward in zip(energies, rewards, strict=True)]
    batch.rewards = torch.tensor([value for row in earned for value in row])
    advantages = OTB(**fields).token_advantages(batch)[0]
    return [part.tolist() for part in advantages.split([len(row) for row in energies])]


def test_siblings_are_weighted_by_cumulative_energy() -> None:
    # Position 1: (1 * 1 + 3 * 0) / 4. Position 2: (2 * 1 + 3 * 0) / 5. Position 3 has one trajectory left.
    found = credited([1.0, 0.0], [[1.0, 1.0], [3.0, 0.0, 1.0]])
    assert found[0] == pytest.approx([0.75, 0.6])
    assert found[1] == pytest.approx([-0.25, -0.4, 0.0])


def test_groups_are_independent_and_rewards_can_be_discounted() -> None:
    energies = [[1.0, 1.0], [1.0, 1.0], [1.0], [1.0]]
    found = credited([1.0, 0.0, 4.0, 2.0], energies, [0, 0, 1, 1], gamma=0.5)
    assert found == [pytest.approx(row) for row in ([0.25, 0.5], [-0.25, -0.5], [1.0], [-1.0])]


ENERGIES = st.lists(st.floats(0.01, 2), min_size=1, max_size=5)


@given(st.lists(st.tuples(st.floats(-5, 5), ENERGIES), min_size=2, max_size=5))
def test_weighted_advantages_sum_to_zero_at_each_position(rows: list[tuple[float, list[float]]]) -> None:
    """Hence the baseline of a position minimizes the weighted sum of squared advantages, the gradient's variance."""
    found = credited([reward for reward, _ in rows], [energies for _, energies in rows])
    for place in range(max(len(energies) for _, energies in rows)):
        there = [(a, energies) for a, (_, energies) in zip(found, rows, strict=True) if len(energies) > place]
        if len(there) > 1:
            assert sum(a[place] * sum(energies[: place + 1]) for a, energies in there) == pytest.approx(0.0, abs=1e-3)


@given(st.integers(2, 5), st.integers(1, 4), st.floats(-5, 5))
def test_equal_rewards_and_lengths_give_zero_credit(size: int, length: int, reward: float) -> None:
    found = credited([reward] * size, [[0.5] * length] * size)
    assert [value for row in found for value in row] == pytest.approx([0.0] * size * length, abs=1e-5)
