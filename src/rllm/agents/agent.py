"""`BaseAgent`: what the engine needs of an agent that it steps through an environment itself.

The engine calls `reset`, then in turn `update_from_env` with what the environment said, asks the model with
`chat_completions`, and hands its text to `update_from_model`, which decides the action. The data types that agents build are
named here too, because their users know them from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rllm.types import Action, Episode, Message, Step, Trajectory

__all__ = ["Action", "BaseAgent", "Episode", "Step", "Trajectory"]


class BaseAgent(ABC):
    """Keeps the conversation and the trajectory of one rollout; one object is used for one rollout at a time."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: a new rollout begins."""

    @property
    def chat_completions(self) -> list[Message]:
        """The messages that the model is asked with next."""
        return []

    @property
    @abstractmethod
    def trajectory(self) -> Trajectory:
        """The rollout so far: one `Step` for every call of `update_from_model`."""

    @abstractmethod
    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: dict[str, Any]) -> None:
        """Take in what the environment answered; after its `reset` with reward 0.0 and `done` False. `info` also has the rollout's
        `max_steps`."""

    @abstractmethod
    def update_from_model(self, response: str) -> Action:
        """Add a `Step` for the model's answer to the trajectory, and return what to do."""

    def get_current_state(self) -> Step | None:
        """The newest step, which the engine completes with tokens, reward and `done`."""
        return self.trajectory.steps[-1] if self.trajectory.steps else None
