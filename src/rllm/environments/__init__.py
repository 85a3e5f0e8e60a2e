"""Environments in which an engine steps an agent.

Read `base/base_env.py` first: the protocol, and how a dataset row becomes an environment. `base/multi_turn_env.py` has
base classes for tasks with a reward per turn and with one answer, `tools/tool_env.py` lets the agent call tools, and
`grid_world.py` is a small world for tests. `named.py` opens environments by name, with an adapter for each scheme:
`file_env.py`, `gymnasium_env.py`, `mcp_env.py`, `openenv_env.py`, `reasoning_gym_env.py`, `verifiers_env.py`, and
`textarena.py` for games and their players.

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
    from rllm.environments.base.multi_turn_env import SingleTurnEnvironment as SingleTurnEnvironment
    from rllm.environments.grid_world import GridWorldEnv as GridWorldEnv
    from rllm.environments.gymnasium_env import GymnasiumEnv as GymnasiumEnv
    from rllm.environments.named import NamedEnvironment as NamedEnvironment
    from rllm.environments.named import open_env as open_env
    from rllm.environments.tools.tool_env import ToolEnvironment as ToolEnvironment

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.environments.base.base_env": "BaseEnv",
        "rllm.environments.base.multi_turn_env": "MultiTurnEnvironment SingleTurnEnvironment",
        "rllm.environments.frozenlake": "FrozenLakeEnv",
        "rllm.environments.grid_world": "GridWorldEnv",
        "rllm.environments.gymnasium_env": "GymnasiumEnv",
        "rllm.environments.named": "NamedEnvironment open_env",
        "rllm.environments.tools.tool_env": "ToolEnvironment",
    },
)
