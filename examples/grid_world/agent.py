"""A walker on a frozen lake: it sees the lake from above, and names one direction a turn."""

from __future__ import annotations

from typing import Any

from rllm.agents.agent import Action, BaseAgent, Step, Trajectory
from rllm.environments.grid_world import LEGEND
from rllm.types import Message

SYSTEM = "Walk from P to G, around every O. Say Up, Down, Left or Right."
"""Explains the letters once, so the environment need not do so in every turn."""


class Walker(BaseAgent):
    """Agent that keeps the conversation; each answer of the model is a `Step` with the direction as its action."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._messages: list[Message] = [{"role": "system", "content": SYSTEM}]
        self._trajectory = Trajectory(name="walker")

    @property
    def chat_completions(self) -> list[Message]:
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: dict[str, Any]) -> None:
        self._messages.append({"role": "user", "content": observation.removesuffix("\n" + LEGEND)})

    def update_from_model(self, response: str) -> Action:
        self._messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(Step(action=response.strip(), model_response=response))
        return Action(response.strip())
