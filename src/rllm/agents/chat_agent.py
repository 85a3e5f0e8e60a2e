"""`ChatAgent`: a conversation that only grows, and its trajectory; base class of the ready-made agents, with three."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rllm.agents.agent import BaseAgent
from rllm.errors import AgentError
from rllm.parser.decoding import SplitText, split_without_prompt
from rllm.types import Action, JSONObject, Message, Step, Trajectory, text_of

QUESTION_KEYS = ("question", "problem", "prompt", "query", "instruction")
"""Keys of a task that may hold its question; the first one present is used."""


class ChatAgent(BaseAgent):
    """Turns observations into messages, and each answer of the model into a `Step` and an action.

    Every prompt starts with the previous prompt and answer, so that its tokens continue theirs. Without
    `accumulate_thinking`, a prompt omits the reasoning of earlier turns and becomes a sequence of its own.
    """

    def __init__(self, *, system_prompt: str | None = None, accumulate_thinking: bool = True) -> None:
        self.system_prompt = system_prompt
        self.accumulate_thinking = accumulate_thinking
        self.reset()

    def reset(self) -> None:
        """Start a new conversation, with the system prompt if there is one."""
        self.messages: list[Message] = []
        """The conversation, answers included."""
        if self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})
        self._trajectory = Trajectory()
        self._observation: Any = None

    @property
    def chat_completions(self) -> list[Message]:
        """Messages of the next model call."""
        if self.accumulate_thinking:
            return list(self.messages)
        return [
            {**message, "content": self.split(text_of(message)).answer} if message["role"] == "assistant" else message
            for message in self.messages
        ]

    @property
    def trajectory(self) -> Trajectory:
        """Rollout so far."""
        return self._trajectory

    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: JSONObject) -> None:
        """Add the observation to the conversation, unless the rollout is over."""
        self._observation = observation
        if not done:
            self.messages += self.observation_to_messages(observation)

    def update_from_model(self, response: str) -> Action:
        """Add the answer to the conversation and a step to the trajectory; the engine completes it with its reward."""
        answer: Message = {"role": "assistant", "content": response}
        action = self.response_to_action(response)
        step = Step(
            chat_completions=[*self.chat_completions, answer],
            observation=self._observation,
            thought=self.split(response).reasoning,
            action=action,
            model_response=response,
        )
        self.messages.append(answer)
        self._trajectory.steps.append(step)
        return Action(action)

    def observation_to_messages(self, observation: Any) -> list[Message]:
        """Return the messages that an observation adds: one from the user, or none if it is empty."""
        text = observation_to_text(observation)
        return [{"role": "user", "content": text}] if text else []

    @abstractmethod
    def response_to_action(self, response: str) -> Any:
        """Return the action in the model's text, which includes its reasoning."""

    def split(self, response: str) -> SplitText:
        """Split a response into reasoning and answer, also if the opening tag is in the prompt."""
        return split_without_prompt(response)


class TextAgent(ChatAgent):
    """A chat whose actions are the model's answers, with its reasoning left out."""

    def response_to_action(self, response: str) -> str:
        return self.split(response).answer


def observation_to_text(observation: Any) -> str:
    """Return the text of an observation: the observation itself, or the question of a task.

    Raises:
        AgentError: if it is neither.
    """
    if observation is None or isinstance(observation, str):
        return observation or ""
    if isinstance(observation, Mapping):
        if not observation:
            return ""
        for key in QUESTION_KEYS:
            if observation.get(key):
                return str(observation[key])
    seen = (
        f"a dict with the keys {sorted(observation)}" if isinstance(observation, Mapping) else repr(observation)[:200]
    )
    raise AgentError(
        f"the environment's observation is {seen}: return a text, or a task with one of {', '.join(QUESTION_KEYS)}"
    )


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


GRID_WORLD_PROMPT = """\
You walk on a frozen lake. Reach the goal G without stepping into a hole O. P is you, _ is ice.
Each turn, choose one of Up, Down, Left, Right. You may reason first; end with your move alone in a block:
```
Right
```"""

_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
_BLOCK = re.compile(r"```(.*?)```", re.DOTALL)


class GridWorldAgent(ChatAgent):
    """Moves in the last direction of the last ``` block, or else of the answer; the move may be empty."""

    def __init__(self, *, system_prompt: str = GRID_WORLD_PROMPT, accumulate_thinking: bool = True) -> None:
        super().__init__(system_prompt=system_prompt, accumulate_thinking=accumulate_thinking)

    def response_to_action(self, response: str) -> str:
        answer = self.split(response).answer
        blocks = _BLOCK.findall(answer)
        moves = _MOVE.findall(blocks[-1] if blocks else answer)
        return moves[-1].capitalize() if moves else ""
