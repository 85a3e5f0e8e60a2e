"""The grid world under the name by which users of the rLLM framework know it."""

from rllm.environments.grid_world.env import GridWorldEnv as FrozenLakeEnv

__all__ = ["FrozenLakeEnv"]
