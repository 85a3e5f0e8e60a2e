from __future__ import annotations

from rllm.algorithms.reinforce import Reinforce

from .values import group_of


def test_reward_is_the_advantage() -> None:
    assert Reinforce().credit(group_of(1.0, 0.0, -2.0)) == [1.0, 0.0, -2.0]
    assert Reinforce().baseline(group_of(1.0)) is None


def test_penalties_are_subtracted() -> None:
    assert Reinforce().credit(group_of(1.0, 0.0, penalties=[0.25, 0.5])) == [0.75, -0.5]
