"""An agent and an environment, driven by hand as an engine would drive them."""

from collections.abc import Awaitable, Callable

import pytest

from rllm.agents.agent import BaseAgent
from rllm.environments.base.base_env import BaseEnv
from rllm.testing.scripted import Script, ScriptedEngine
from rllm.types import Trajectory

Play = Callable[[BaseAgent, BaseEnv, Script], Awaitable[Trajectory]]


@pytest.fixture
def play() -> Play:
    return _play


async def _play(agent: BaseAgent, env: BaseEnv, script: Script) -> Trajectory:
    """Return the trajectory of one rollout, its steps with the exact tokens of the scripted model."""
    engine = ScriptedEngine(script)
    observation, info = env.reset()
    agent.reset()
    agent.update_from_env(observation, 0.0, False, info)
    done = False
    while not done:
        output = await engine.get_model_response(agent.chat_completions)
        action = agent.update_from_model(output.text)
        step = agent.get_current_state()
        assert step is not None
        step.fill_from_output(output)
        observation, step.reward, done, step.info = env.step(action)
        step.done = done
        agent.update_from_env(observation, step.reward, done, step.info)
    env.close()
    return agent.trajectory
