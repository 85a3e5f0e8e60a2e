from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.rae import RAE
from rllm.errors import ConfigError
from rllm.types import Trajectory, TrajectoryGroup


def group(*rewards: float, role: str = "player_0", game: str = "Nim") -> TrajectoryGroup:
    return TrajectoryGroup(
        trajectories=[Trajectory(name=role, reward=reward, info={"game": game}) for reward in rewards]
    )


def test_baseline_is_updated_after_each_reward() -> None:
    algorithm = RAE(decay=0.5)
    # b: 0 -> 0.5 -> -0.25 -> 0.375
    assert algorithm.credit(group(1.0, -1.0, 1.0)) == [0.5, -0.75, 0.625]
    assert algorithm.baseline(group(1.0)) == 0.375


def test_each_role_of_each_game_has_its_own_baseline() -> None:
    algorithm = RAE(decay=0.5)
    groups = [group(1.0), group(-1.0, role="player_1"), group(0.0, game="Chess"), group(1.0)]
    assert algorithm.credits(groups) == [[0.5], [-0.5], [0.0], [0.25]]
    assert algorithm.baselines == {"Nim/player_0": 0.75, "Nim/player_1": -0.5, "Chess/player_0": 0.0}


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12), st.floats(0, 0.99))
def test_restored_state_continues_bit_for_bit(rewards: list[float], decay: float) -> None:
    whole, first, second = RAE(decay=decay), RAE(decay=decay), RAE(decay=decay)
    advantages = whole.credit(group(*rewards))
    before = first.credit(group(*rewards[:1]))
    second.restore(json.loads(json.dumps(first.state())))
    assert before + second.credit(group(*rewards[1:])) == advantages
    second.restore({})
    assert second.credit(group(*rewards)) == advantages


@given(st.floats(-1, 1))
def test_constant_reward_gives_shrinking_advantages(reward: float) -> None:
    advantages = RAE(decay=0.9).credit(group(*[reward] * 50))
    assert advantages == pytest.approx([reward * 0.9**place for place in range(1, 51)])


@pytest.mark.parametrize("settings", [{"decay": 1.0}, {"decay": -0.1}, {"level": "step"}])
def test_invalid_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(settings))}"):
        RAE(**settings)  # type: ignore[arg-type]
