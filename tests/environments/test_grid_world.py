import pytest
from hypothesis import given
from hypothesis import strategies as st
from rllm.environments.frozenlake.frozenlake import FrozenLakeEnv

from rllm.environments.grid_world import LEGEND, GridMap, GridWorldEnv, num_moves
from rllm.errors import ConfigError
from rllm.types import Action

TASK = {"seed": 3, "size": 4}
START = f"_ _ _ _\n_ _ O P\n_ G _ O\n_ _ _ _\n{LEGEND}"


def test_map_is_shown_with_its_legend():
    assert GridWorldEnv.from_dict(TASK).reset() == (START, {})


def test_walk_to_the_goal_earns_one():
    env = GridWorldEnv.from_dict({**TASK, "question": "ignored"})
    steps = [env.step(move) for move in ("Up", "left", Action("LEFT"), "Down", "Down")]
    assert [reward for _, reward, _, _ in steps] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [done for _, _, done, _ in steps] == [False] * 4 + [True]
    assert steps[-1][0].startswith("_ _ _ _\n_ _ O _\n_ * _ O\n")
    assert steps[-1][3] == {"is_valid": True, "num_steps": 5, "truncated": False}


def test_moves_have_the_numbers_of_the_rllm_framework():
    env = FrozenLakeEnv.from_dict(TASK)
    steps = [env.step(move) for move in ("4", 1, Action("1"), 2, "2")]
    assert steps[-1][1] == 1.0
    assert env.step(0)[3]["is_valid"] is False


def test_hole_ends_the_walk_without_reward():
    observation, reward, done, info = GridWorldEnv.from_dict(TASK).step("Left")
    assert (reward, done, info["truncated"]) == (0.0, True, False)
    assert "_ _ X _" in observation


def test_border_cannot_be_crossed():
    assert GridWorldEnv.from_dict(TASK).step("Right")[0] == START


@pytest.mark.parametrize("action", ["jump", "", None, 7, "u" * 10_000])
def test_invalid_action_costs_a_step_and_moves_nothing(action: object):
    observation, reward, done, info = GridWorldEnv.from_dict(TASK).step(action)
    assert observation.endswith(f"use one of Up, Down, Left, Right.\n{START}")
    assert len(observation) < 400
    assert (reward, done) == (0.0, False)
    assert info == {"is_valid": False, "num_steps": 1, "truncated": False}


def test_last_step_is_truncated():
    env = GridWorldEnv.from_dict({**TASK, "max_steps": 5})
    ends = [env.step("Right")[2:] for _ in range(5)]
    assert [done for done, _ in ends] == [False] * 4 + [True]
    assert ends[-1][1]["truncated"] is True


def test_reset_restarts_the_same_walk():
    env = GridWorldEnv(seed=5, size=4, is_slippery=True)
    walks = []
    for _ in range(2):
        env.reset()
        walks.append([env.step(move)[0] for move in ("Up", "Right", "Right", "Up")])
    assert walks[0] == walks[1]


def test_slippery_ice_changes_moves_and_not_the_map():
    dry, wet = GridWorldEnv(seed=5, size=8, p=1.0), GridWorldEnv(seed=5, size=8, p=1.0, is_slippery=True)
    assert dry.reset() == wet.reset()
    assert [dry.step("Up")[0] for _ in range(6)] != [wet.step("Up")[0] for _ in range(6)]


@given(seed=st.integers(), size=st.integers(2, 6), p=st.floats(0, 1), max_steps=st.integers(1, 12))
def test_every_map_is_solvable_in_time(seed: int, size: int, p: float, max_steps: int):
    env = GridWorldEnv(seed=seed, size=size, p=p, max_steps=max_steps)
    moves = num_moves(env.grid, at_most=max_steps)
    assert moves is not None
    assert 1 <= moves <= max_steps
    assert env.grid == GridWorldEnv(seed=seed, size=size, p=p, max_steps=max_steps).grid


def test_shortest_path_goes_around_holes():
    wall = frozenset({(0, 1), (1, 1)})
    around = GridMap(size=3, start=(0, 0), goal=(0, 2), holes=wall)
    assert num_moves(around, at_most=9) == 6
    assert num_moves(around, at_most=5) is None
    assert num_moves(GridMap(size=3, start=(0, 0), goal=(0, 2), holes=wall | {(2, 1)}), at_most=9) is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"size": 1}, "size=1"),
        ({"p": 1.5}, r"p=1\.5"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"seed": "many"}, "seed='many'.*int"),
        ({"size": 4.5}, r"size=4\.5.*int"),
        ({"is_slippery": [1]}, "is_slippery.*bool"),
    ],
)
def test_invalid_setting_is_reported(setting: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        GridWorldEnv.from_dict(setting)


def test_cells_of_a_csv_file_are_parsed():
    env = GridWorldEnv.from_dict({"seed": "3", "size": "4", "p": "0.8", "is_slippery": "False", "max_steps": None})
    assert env.reset()[0] == START
    assert env.is_slippery is False


def test_frozen_lake_env_is_an_alias():
    assert FrozenLakeEnv is GridWorldEnv
