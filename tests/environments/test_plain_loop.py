"""Environments and agents in a user's own loop, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rllm.agents.agent import BaseAgent
from rllm.agents.chat_agent import GridWorldAgent, MathAgent
from rllm.agents.tool_agent import ToolAgent
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.multi_turn_env import MultiTurnEnvironment, SingleTurnEnvironment
from rllm.environments.grid_world import GridWorldEnv
from rllm.environments.gymnasium_env import GymnasiumEnv
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import ConfigError
from rllm.types import Message

TASK = {"question": "What is 2 + 3?", "ground_truth": "5"}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0)
    return a + b


def exact(task: Any, answer: Any) -> float:
    return float(answer == task["ground_truth"])


class Guess(MultiTurnEnvironment):
    @staticmethod
    def from_dict(info: dict[str, Any]) -> Guess:
        return Guess(info)

    def get_reward_and_next_obs(self, task: Any, action: Any) -> tuple[float, Any]:
        self.done = action == task["ground_truth"]
        return float(self.done), f"{action} is wrong."


def tool_call(name: str) -> dict[str, Any]:
    return {"id": "c1", "function": {"name": name, "arguments": {"a": 2, "b": 3}}}


def played(env: BaseEnv, actions: list[Any]) -> list[float | None]:
    """Return the rewards of a rollout with these actions."""
    rewards: list[float | None] = []
    env.reset()
    done = False
    while not done:
        _, reward, done, info = env.step(actions[len(rewards)])
        assert isinstance(info, dict)
        rewards.append(reward)
    env.close()
    return rewards


GAMES = [
    (lambda: SingleTurnEnvironment(TASK, exact), ["5"], [1.0]),
    (lambda: Guess(TASK), ["4", "5"], [0.0, 1.0]),
    (lambda: ToolEnvironment(TASK, [add], reward_fn=exact), [[tool_call("add")], "5"], [None, 1.0]),
    (lambda: ToolEnvironment(TASK, [slow_add], reward_fn=exact), [[tool_call("slow_add")], "5"], [None, 1.0]),
    (lambda: GridWorldEnv(seed=0, max_steps=16), ["nowhere"] * 16, [0.0] * 16),
    (lambda: GymnasiumEnv("CartPole-v1", {"max_episode_steps": 1}, seed=0), ["1"], [1.0]),
]


@pytest.mark.parametrize(("env", "actions", "rewards"), GAMES)
def test_plain_loop_gets_the_rewards(env: Any, actions: list[Any], rewards: list[float | None]) -> None:
    assert played(env(), actions) == rewards


@pytest.mark.parametrize(("env", "actions", "rewards"), GAMES)
async def test_plain_loop_may_be_inside_an_event_loop(
    env: Any, actions: list[Any], rewards: list[float | None]
) -> None:
    assert played(env(), actions) == rewards


@pytest.mark.parametrize(
    ("agent", "env", "answers"),
    [
        (MathAgent(), SingleTurnEnvironment(TASK, exact), ["5"]),
        (GridWorldAgent(), GridWorldEnv(seed=0, max_steps=2), ["Stay.", "Stay."]),
        (
            ToolAgent(tools=[add]),
            ToolEnvironment(TASK, [add], reward_fn=exact),
            ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "5"],
        ),
    ],
)
def test_messages_are_the_conversation(agent: BaseAgent, env: BaseEnv, answers: list[str]) -> None:
    observation, info = env.reset()
    agent.reset()
    agent.update_from_env(observation, 0.0, False, info)
    done = False
    for answer in answers:
        assert not done
        action = agent.update_from_model(answer)
        observation, reward, done, info = env.step(action)
        agent.update_from_env(observation, reward, done, info)
    assert done
    messages: list[Message] = agent.messages  # type: ignore[attr-defined]
    assert messages == agent.trajectory.steps[-1].chat_completions
    assert [message["content"] for message in messages if message["role"] == "assistant"] == answers


def test_subclass_with_its_own_step_uses_it() -> None:
    from rllm.environments.base.base_env import step_method

    class Counting(ToolEnvironment):
        def step(self, action: Any) -> Any:
            return super().step(action)

    env, counting = ToolEnvironment(TASK), Counting(TASK)
    assert step_method(env) == env.async_step
    assert step_method(counting) == counting.step


def test_first_task_is_checked_only_by_the_class_that_reads_it() -> None:
    from rllm.environments.base.base_env import accepted_arguments, check_first_task

    class Own(SingleTurnEnvironment):
        @classmethod
        def from_dict(cls, info: Any) -> Any:
            raise AssertionError("not to be called")

    class OwnWorld(GridWorldEnv):
        @classmethod
        def from_dict(cls, info: Any) -> Any:
            return cls(seed=info["map"])

    check_first_task(Own, TASK)
    with pytest.raises(ConfigError, match="reward_fn"):
        check_first_task(SingleTurnEnvironment, TASK)
    assert "seed" in (accepted_arguments(GridWorldEnv) or ())
    assert accepted_arguments(OwnWorld) is None
