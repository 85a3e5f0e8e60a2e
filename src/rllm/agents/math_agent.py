"""`MathAgent`: asks a mathematical question and returns the model's whole text as its action."""

from __future__ import annotations

from typing import Any

from rllm.agents.chat_agent import ChatAgent
from rllm.types import Message

INSTRUCTION = "Reason step by step, and give your final answer within \\boxed{}."


class MathAgent(ChatAgent):
    """Agent for `SingleTurnEnvironment` with a mathematical reward; further turns continue the conversation."""

    def __init__(self, accumulate_thinking: bool = True) -> None:
        super().__init__(accumulate_thinking=accumulate_thinking)

    def observation_to_messages(self, observation: Any) -> list[Message]:
        messages = super().observation_to_messages(observation)
        if messages and not self.trajectory.steps:
            messages[0]["content"] += f"\n\n{INSTRUCTION}"
        return messages

    def response_to_action(self, response: str) -> str:
        return response
