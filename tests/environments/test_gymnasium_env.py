import json
import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.errors import ConfigError, EnvError, MissingDependencyError
from rllm.types import Action


class Doors(gymnasium.Env):
    """Environment with two actions, which returns its input in numpy's types."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, action_space: spaces.Space | None = None, *, num_steps: int = 3) -> None:
        self.action_space = action_space or spaces.Discrete(2, start=1)
        self.observation_space = spaces.Box(0, 1, (2,), dtype=np.float32)
        self.num_steps = num_steps
        self.actions: list[Any] = []
        self.num_closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.actions = []
        return self.np_random.random(2, dtype=np.float32), {"seed": np.int64(seed or 0)}

    def step(self, action):
        self.actions.append(action)
        info = {"array": np.arange(2), "flag": np.bool_(True), "nested": {"pair": (np.float32(0.5), None)}}
        return np.zeros(2, dtype=np.float32), np.float64(0.25), False, len(self.actions) >= self.num_steps, info

    def close(self):
        self.num_closed += 1


class OldApi(Doors):
    def step(self, action):
        return np.zeros(2), 0.0, False, {}


class Broken(Doors):
    def step(self, action):
        raise RuntimeError("the door is stuck")


def test_cart_pole_gives_the_numbers_of_gymnasium():
    env = GymnasiumEnv.from_dict({"env": "CartPole-v1", "seed": 7, "question": "ignored"})
    bare = gymnasium.make("CartPole-v1")
    try:
        assert json.loads(env.reset()[0]) == bare.reset(seed=7)[0].tolist()
        for action in (1, 0, 1):
            observation, reward, done, info = env.step(Action(f"I push {action}."))
            expected = bare.step(action)
            assert json.loads(observation) == expected[0].tolist()
            assert (reward, done, info["truncated"]) == (expected[1], expected[2], expected[3])
    finally:
        env.close()
        bare.close()


def test_reset_with_a_seed_is_reproducible():
    env = GymnasiumEnv(Doors, seed=11)
    assert env.reset() == env.reset()
    assert env.reset()[1] == {"seed": 11, "num_invalid_actions": 0}


def test_termination_on_the_last_allowed_step_is_not_a_truncation():
    labels = ["left", "down", "right", "up"]
    lake = {"is_slippery": False, "max_episode_steps": 6}
    env = GymnasiumEnv("FrozenLake-v1", lake, action_labels=labels)
    for walk, reward, end in (("d d r r d r", 1.0, "terminated"), ("u u u u u u", 0.0, "truncated")):
        env.reset()
        steps = [env.step(next(label for label in labels if label[0] == move)) for move in walk.split()]
        _, last_reward, done, info = steps[-1]
        assert (last_reward, done) == (reward, True)
        assert [name for name in ("terminated", "truncated") if info[name]] == [end]


def test_returned_values_are_plain_python():
    env = GymnasiumEnv(Doors)
    env.reset()
    observation, reward, done, info = env.step("1")
    assert observation == "[0.0, 0.0]"
    assert (type(reward), reward, done) == (float, 0.25, False)
    assert info == {
        "array": [0, 1],
        "flag": True,
        "nested": {"pair": [0.5, None]},
        "num_invalid_actions": 0,
        "terminated": False,
        "truncated": False,
    }
    assert json.loads(json.dumps(info)) == info


def test_truncation_is_distinguished_from_termination():
    env = GymnasiumEnv(Doors, {"num_steps": 1})
    env.reset()
    _, _, done, info = env.step("2")
    assert (done, info["terminated"], info["truncated"]) == (True, False, True)


def test_answer_without_a_legal_action_is_counted_and_repeats_the_question():
    env = GymnasiumEnv(Doors, action_labels=["open", "close"])
    env.reset()
    assert env.step("hm") == (
        "Invalid action: the answer names no action. Nothing happened. Legal actions: 1 (open), 2 (close).",
        0.0,
        False,
        {"num_invalid_actions": 1, "terminated": False, "truncated": False},
    )
    assert env.step("7")[3]["num_invalid_actions"] == 2
    assert env.step("Open it: Close!")[3]["num_invalid_actions"] == 2
    assert env.env.actions == [2]


def test_non_text_action_is_passed_unchanged():
    env = GymnasiumEnv(Doors)
    env.reset()
    env.step(Action(2))
    assert env.env.actions == [2]


def test_user_functions_convert_observations_and_actions():
    def parse(text: str, action_space: spaces.Space) -> int:
        if not text.startswith("go"):
            raise ValueError("say 'go'")
        return 1

    env = GymnasiumEnv(Doors, observation_to_text=lambda observation: f"{len(observation)} doors", parse_action=parse)
    assert env.reset()[0] == "2 doors"
    assert env.step("go on")[1] == 0.25
    assert env.step("stop")[0].startswith("Invalid action: say 'go'.")


def test_error_in_the_action_parser_names_it():
    env = GymnasiumEnv(Doors, parse_action=lambda text, space: {}["move"])
    with pytest.raises(EnvError, match="parse_action of Doors raised KeyError"):
        env.step("1")


def test_error_or_wrong_return_value_names_the_environment():
    with pytest.raises(EnvError, match=r"Broken\.step raised RuntimeError: the door is stuck"):
        GymnasiumEnv(Broken).step("1")
    with pytest.raises(EnvError, match=r"OldApi\.step returned 4"):
        GymnasiumEnv(OldApi).step("1")


def test_environment_is_closed_once():
    env = GymnasiumEnv(Doors)
    env.close()
    env.close()
    assert env.env.num_closed == 1


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"env": "NoSuchGame-v0"}, "NoSuchGame-v0"),
        ({"question": "?"}, "'env'"),
        (
            {"env": gymnasium.make_vec, "env_kwargs": {"id": "CartPole-v1"}},
            "make_vec",
        ),
        ({"env": "CartPole-v1", "action_labels": ["left"]}, "action_labels"),
    ],
)
def test_task_that_cannot_be_created_is_rejected(task: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnv.from_dict(task)


def test_constructor_error_names_the_environment():
    with pytest.raises(EnvError, match="Doors raised TypeError"):
        GymnasiumEnv(Doors, {"num_doors": 3})


def test_missing_gymnasium_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # Python's own error for a missing module
    with pytest.raises(MissingDependencyError, match=r"pip install 'rllm\[gym\]'"):
        GymnasiumEnv("CartPole-v1")
