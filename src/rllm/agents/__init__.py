"""Agents that an engine steps through an environment.

Read `agent.py` first: the protocol `BaseAgent`. `chat_agent.py` implements it for conversations that only grow; the
others subclass it: `math_agent.py` asks a question, `tool_agent.py` calls tools, `grid_world_agent.py` walks a grid
world. `benchmark_agent.py` makes the agent function of a benchmark.

Each agent works without an engine: `agent.messages` is the conversation.

    observation, info = env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    action = agent.update_from_model(answer_to(agent.messages))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.agents.agent import BaseAgent as BaseAgent
    from rllm.agents.chat_agent import ChatAgent as ChatAgent
    from rllm.agents.grid_world_agent import GridWorldAgent as GridWorldAgent
    from rllm.agents.math_agent import MathAgent as MathAgent
    from rllm.agents.tool_agent import ToolAgent as ToolAgent
    from rllm.compat.class_names import FrozenLakeAgent as FrozenLakeAgent
    from rllm.types import Action as Action
    from rllm.types import Episode as Episode
    from rllm.types import Step as Step
    from rllm.types import Trajectory as Trajectory

__all__ = [
    "Action",
    "BaseAgent",
    "ChatAgent",
    "Episode",
    "FrozenLakeAgent",
    "GridWorldAgent",
    "MathAgent",
    "Step",
    "ToolAgent",
    "Trajectory",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Action": "rllm.types",
        "BaseAgent": "rllm.agents.agent",
        "ChatAgent": "rllm.agents.chat_agent",
        "Episode": "rllm.types",
        "FrozenLakeAgent": "rllm.compat.class_names",
        "GridWorldAgent": "rllm.agents.grid_world_agent",
        "MathAgent": "rllm.agents.math_agent",
        "Step": "rllm.types",
        "ToolAgent": "rllm.agents.tool_agent",
        "Trajectory": "rllm.types",
    },
)
