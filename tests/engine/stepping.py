"""A small agent and a small environment shared by the tests of stepping engines."""

from __future__ import annotations

from typing import Any, ClassVar

from rllm.agents.agent import Action, BaseAgent, Step, Trajectory
from rllm.environments.base.base_env import BaseEnv


class Talker(BaseAgent):
    """Agent that returns the model's answer as its action."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        self.path = Trajectory(name="talker")

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self.messages

    @property
    def trajectory(self) -> Trajectory:
        return self.path

    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: dict[str, Any]) -> None:
        self.messages = [*self.messages, {"role": "user", "content": str(observation)}]

    def update_from_model(self, response: str) -> Action:
        self.messages = [*self.messages, {"role": "assistant", "content": response}]
        self.path.steps.append(Step(action=response))
        return Action(response)


class Countdown(BaseEnv):
    """Environment that counts down from `start`, with reward 1 at 0; a step returns its action in `info`."""

    closed: ClassVar[list[int]] = []

    def __init__(self, start: int = 2) -> None:
        self.left = start

    def reset(self) -> tuple[Any, dict[str, Any]]:
        return f"{self.left} left", {}

    def step(self, action: Any) -> tuple[Any, float | None, bool, dict[str, Any]]:
        self.left -= 1
        return f"{self.left} left", float(self.left == 0), self.left == 0, {"action": action}

    def close(self) -> None:
        self.closed.append(self.left)

    @staticmethod
    def from_dict(info: Any) -> Countdown:
        return Countdown(info["start"])
