"""`BaseAgent`, the protocol of agents that an engine steps through an environment.

The engine calls `reset`, then in turn `update_from_env` with what the environment returned, asks the model with
`chat_completions`, and passes its text to `update_from_model`, which returns the action. The data types that agents
build can be imported from here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rllm.types import Action, Episode, JSONObject, Message, Step, Trajectory

__all__ = ["Action", "BaseAgent", "Episode", "Step", "Trajectory"]


class BaseAgent(ABC):
    """Conversation and trajectory of one rollout; an object is used for one rollout at a time."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; a new rollout starts."""

    @property
    def chat_completions(self) -> list[Message]:
        """Messages of the next model call."""
        return []

    @property
    @abstractmethod
    def trajectory(self) -> Trajectory:
        """Rollout so far: one `Step` for every call of `update_from_model`."""

    @abstractmethod
    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: JSONObject) -> None:
        """Add what the environment returned.

        After the environment's `reset` it is called with reward 0.0 and `done` False. `info` also has the rollout's
        `max_steps`.
        """

    @abstractmethod
    def update_from_model(self, response: str) -> Action:
        """Add a `Step` for the model's answer to the trajectory, and return the action."""

    def get_current_state(self) -> Step | None:
        """Return the newest step, which the engine completes with tokens, reward and `done`."""
        return self.trajectory.steps[-1] if self.trajectory.steps else None
