"""Environments in which an engine steps an agent.

Read `base/base_env.py` first: the protocol, and how a dataset row becomes an environment. `base/multi_turn_env.py` and
`base/single_turn_env.py` are base classes for tasks with a reward per turn and with one answer, `tools/tool_env.py`
lets the agent call tools, and `grid_world.py` is a small world for tests. `named.py` opens environments by name, with
an adapter for each scheme: `gymnasium_env.py`, `mcp_env.py`, `openenv_env.py`, `reasoning_gym_env.py`,
`verifiers_env.py`, and `textarena.py` for games, whose players are in `players.py`.

Each environment works without an engine:

    observation, info = env.reset()
    done = False
    while not done:
        observation, reward, done, info = env.step(act(observation))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.environments.base.base_env import BaseEnv as BaseEnv
    from rllm.environments.base.multi_turn_env import MultiTurnEnvironment as MultiTurnEnvironment
    from rllm.environments.base.single_turn_env import SingleTurnEnvironment as SingleTurnEnvironment
    from rllm.environments.grid_world import GridWorldEnv as GridWorldEnv
    from rllm.environments.gymnasium_env import GymnasiumEnv as GymnasiumEnv
    from rllm.environments.named import NamedEnvironment as NamedEnvironment
    from rllm.environments.named import open_env as open_env
    from rllm.environments.tools.tool_env import ToolEnvironment as ToolEnvironment

__all__ = [
    "BaseEnv",
    "FrozenLakeEnv",
    "GridWorldEnv",
    "GymnasiumEnv",
    "MultiTurnEnvironment",
    "NamedEnvironment",
    "SingleTurnEnvironment",
    "ToolEnvironment",
    "open_env",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BaseEnv": "rllm.environments.base.base_env",
        "FrozenLakeEnv": "rllm.environments.frozenlake",
        "GridWorldEnv": "rllm.environments.grid_world",
        "GymnasiumEnv": "rllm.environments.gymnasium_env",
        "MultiTurnEnvironment": "rllm.environments.base.multi_turn_env",
        "NamedEnvironment": "rllm.environments.named",
        "SingleTurnEnvironment": "rllm.environments.base.single_turn_env",
        "ToolEnvironment": "rllm.environments.tools.tool_env",
        "open_env": "rllm.environments.named",
    },
)
