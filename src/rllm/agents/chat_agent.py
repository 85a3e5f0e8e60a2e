"""`ChatAgent`: a conversation that only grows, and the trajectory of it; the ready-made agents say what its turns mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rllm.agents.agent import BaseAgent
from rllm.errors import AgentError
from rllm.parser.reasoning import SplitText, split_without_prompt
from rllm.types import Action, Message, Step, Trajectory, text_of

QUESTION_KEYS = ("question", "problem", "prompt", "query", "instruction")
"""Under which a task keeps what it asks, the first one that is there."""


class ChatAgent(BaseAgent):
    """What the environment says becomes messages, and each answer of the model a `Step` and an action.

    Every prompt begins with the whole prompt and answer before it, so that its tokens continue theirs. Without
    `accumulate_thinking`, a prompt leaves out what the model thought in earlier turns, and is a sequence of its own.
    """

    def __init__(self, *, system_prompt: str | None = None, accumulate_thinking: bool = True) -> None:
        self.system_prompt = system_prompt
        self.accumulate_thinking = accumulate_thinking
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation, with the system prompt if there is one."""
        self._messages: list[Message] = []
        if self.system_prompt:
            self._messages.append({"role": "system", "content": self.system_prompt})
        self._trajectory = Trajectory()
        self._observation: Any = None

    @property
    def chat_completions(self) -> list[Message]:
        """The messages that the model is asked with next."""
        if self.accumulate_thinking:
            return list(self._messages)
        return [self._without_thought(message) for message in self._messages]

    @property
    def trajectory(self) -> Trajectory:
        """The rollout so far."""
        return self._trajectory

    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: dict[str, Any]) -> None:
        """Add what the environment said to the conversation; the end of a rollout says nothing more to the model."""
        self._observation = observation
        if not done:
            self._messages += self.observation_to_messages(observation)

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
        self._messages.append(answer)
        self._trajectory.steps.append(step)
        return Action(action)

    def observation_to_messages(self, observation: Any) -> list[Message]:
        """The messages that an observation adds: one from the user, unless there is nothing to say."""
        text = observation_to_text(observation)
        return [{"role": "user", "content": text}] if text else []

    @abstractmethod
    def response_to_action(self, response: str) -> Any:
        """What the model decided; `response` is its whole text, thoughts included."""

    def split(self, response: str) -> SplitText:
        """Thought and answer of a response, also where the opening tag was already in the prompt."""
        return split_without_prompt(response)

    def _without_thought(self, message: Message) -> Message:
        """An assistant's message with its answer only; others as they are."""
        if message["role"] != "assistant":
            return message
        return {**message, "content": self.split(text_of(message)).answer}


def observation_to_text(observation: Any) -> str:
    """What an observation says: a text itself, or a task's question.

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
