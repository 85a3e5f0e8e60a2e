"""Environments that an engine steps an agent through: `BaseEnv`, adapters, and a small set of ready-made ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.environments.base.base_env import BaseEnv as BaseEnv
    from rllm.environments.base.multi_turn_env import MultiTurnEnvironment as MultiTurnEnvironment
    from rllm.environments.base.single_turn_env import SingleTurnEnvironment as SingleTurnEnvironment
    from rllm.environments.grid_world.env import GridWorldEnv as GridWorldEnv
    from rllm.environments.gymnasium_env import GymnasiumEnv as GymnasiumEnv
    from rllm.environments.tools.tool_env import ToolEnvironment as ToolEnvironment

__all__ = [
    "BaseEnv",
    "FrozenLakeEnv",
    "GridWorldEnv",
    "GymnasiumEnv",
    "MultiTurnEnvironment",
    "SingleTurnEnvironment",
    "ToolEnvironment",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BaseEnv": "rllm.environments.base.base_env",
        "FrozenLakeEnv": "rllm.environments.frozenlake",
        "GridWorldEnv": "rllm.environments.grid_world.env",
        "GymnasiumEnv": "rllm.environments.gymnasium_env",
        "MultiTurnEnvironment": "rllm.environments.base.multi_turn_env",
        "SingleTurnEnvironment": "rllm.environments.base.single_turn_env",
        "ToolEnvironment": "rllm.environments.tools.tool_env",
    },
)
