import pytest

from rllm.agents.chat_agent import GridWorldAgent
from rllm.compat.class_names import FrozenLakeAgent
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.errors import ConfigError


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("```\nUp\n```", "Up"),
        ("I could go ```Up``` but rather ```left```", "Left"),
        ("Not Up: the hole is there. Down", "Down"),
        ("<think>```Up```</think>right", "Right"),
        ("```Right", "Right"),  # cut off before the end of the block
        ("```jump```", ""),
        ("upward", ""),
        ("", ""),
    ],
)
def test_last_direction_in_the_text_is_the_action(response: str, action: str):
    assert GridWorldAgent().update_from_model(response).action == action


async def test_walk_to_the_goal_is_one_token_sequence(play):
    # seed 3:   _ _ _ _
    #           _ _ O P
    #           _ G _ O
    #           _ _ _ _
    env = GridWorldEnv(seed=3, size=4)
    walk = ["```\nUp\n```", "Left now", "Left", "jump", "Down", "Down"]
    trajectory = await play(GridWorldAgent(), env, walk)

    assert [step.action for step in trajectory.steps] == ["Up", "Left", "Left", "", "Down", "Down"]
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [step.done for step in trajectory.steps] == [False] * 5 + [True]
    assert "use one of Up, Down, Left, Right." in trajectory.steps[4].observation
    for earlier, later in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        tokens = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(tokens)] == tokens


async def test_agent_plays_gymnasium_frozen_lake(play):
    lake = {"env": "FrozenLake-v1", "env_kwargs": {"render_mode": "ansi", "is_slippery": False}, "seed": 0}
    env = GymnasiumEnv.from_dict({**lake, "action_labels": ["left", "down", "right", "up"]})
    trajectory = await play(GridWorldAgent(), env, ["Down", "down", "Right", "Right", "Down", "Right"])
    assert [step.reward for step in trajectory.steps] == [0.0] * 5 + [1.0]
    assert "[S]FFF" in trajectory.steps[0].observation


async def test_frozen_lake_accepts_the_settings_of_the_rllm_framework(play):
    agent = FrozenLakeAgent(max_steps=10, use_accumulate_thinking=False, use_accumulate_history=True)
    trajectory = await play(agent, GridWorldEnv(seed=3, size=4), ["<think>Where?</think>Up", "Left"])
    assert [message["content"] for message in trajectory.steps[1].chat_completions][2::2] == ["Up", "Left"]
    with pytest.raises(ConfigError, match="use_accumulate_history=False: every prompt has all turns"):
        FrozenLakeAgent(use_accumulate_history=False)
