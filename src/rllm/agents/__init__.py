"""Agents that are stepped by an engine: `BaseAgent`, and a small set of ready-made ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.agents.agent import BaseAgent as BaseAgent
    from rllm.agents.chat_agent import ChatAgent as ChatAgent
    from rllm.agents.grid_world_agent import GridWorldAgent as GridWorldAgent
    from rllm.agents.math_agent import MathAgent as MathAgent
    from rllm.agents.tool_agent import ToolAgent as ToolAgent
    from rllm.compat.frozenlake_agent import FrozenLakeAgent as FrozenLakeAgent
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
        "FrozenLakeAgent": "rllm.compat.frozenlake_agent",
        "GridWorldAgent": "rllm.agents.grid_world_agent",
        "MathAgent": "rllm.agents.math_agent",
        "Step": "rllm.types",
        "ToolAgent": "rllm.agents.tool_agent",
        "Trajectory": "rllm.types",
    },
)
