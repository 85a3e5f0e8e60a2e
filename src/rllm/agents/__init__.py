"""Agents that an engine steps through an environment.

Read `agent.py` first: the protocol `BaseAgent`. `chat_agent.py` implements it for conversations that only grow, and has
agents that ask a question and walk a grid world; `tool_agent.py` calls tools. `benchmark_agent.py` makes the agent
function of a benchmark.

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
    from rllm.agents.chat_agent import GridWorldAgent as GridWorldAgent
    from rllm.agents.chat_agent import MathAgent as MathAgent
    from rllm.agents.tool_agent import ToolAgent as ToolAgent
    from rllm.compat.class_names import FrozenLakeAgent as FrozenLakeAgent
    from rllm.types import Action as Action
    from rllm.types import Episode as Episode
    from rllm.types import Step as Step
    from rllm.types import Trajectory as Trajectory

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.agents.agent": "BaseAgent",
        "rllm.agents.chat_agent": "ChatAgent GridWorldAgent MathAgent",
        "rllm.agents.tool_agent": "ToolAgent",
        "rllm.compat.class_names": "FrozenLakeAgent",
        "rllm.types": "Action Episode Step Trajectory",
    },
)
