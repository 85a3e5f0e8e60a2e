"""`SimpleWorkflow`: ask the model once, and score the answer with a reward function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rllm.agents.agent import BaseAgent
from rllm.errors import ConfigError
from rllm.inference.engine import InferenceEngine
from rllm.rewards.scoring import as_reward_output
from rllm.types import Action, Episode, JSONMapping, JSONObject, Message, Step, Task, TerminationReason, Trajectory
from rllm.workflows.workflow import Workflow

TEXT_KEYS = ("question", "prompt", "problem")
"""Keys of a task that may hold its question; the first one present is used, after `messages`."""


class SimpleAgent(BaseAgent):
    """Trajectory and conversation that a workflow fills in, without decisions of its own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self.messages: list[Message] = []

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    @property
    def chat_completions(self) -> list[Message]:
        """Messages of the next model call."""
        return self.messages

    def update_from_env(self, observation: Any, reward: float | None, done: bool, info: JSONObject) -> None:
        raise NotImplementedError

    def update_from_model(self, response: str) -> Action:
        raise NotImplementedError


class SimpleWorkflow(Workflow):
    """One call and one step; the reward comes from `reward_function(task, answer)`."""

    def __init__(
        self,
        rollout_engine: InferenceEngine | None = None,
        *,
        reward_function: Callable[[Any, Any], Any],
        system_prompt: str | None = None,
        name: str = "agent",
        sampling_params: JSONMapping | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(rollout_engine, **kwargs)
        if not callable(reward_function):
            raise ConfigError(f"reward_function={reward_function!r}: use a function of (task, answer)")
        self.reward_function = reward_function
        self.system_prompt = system_prompt
        self.name = name
        self.sampling_params = dict(sampling_params or {})

    async def run(self, task: Task, uid: str, **kwargs: Any) -> Episode:
        """Ask the model and score its answer."""
        messages = messages_of(task, self.system_prompt)
        output = await self.rollout_engine.get_model_response(messages, **self.sampling_params)
        step = Step.from_model_output(output, messages, action=output.content)
        verdict = await self.run_in_executor(as_reward_output, self.reward_function, task, output.content)
        step.done, step.reward = True, verdict.reward
        step.info.update(verdict.metadata)
        trajectory = Trajectory(
            name=self.name, task=task, steps=[step], reward=verdict.reward, reward_parts=verdict.parts
        )
        is_correct = verdict.is_correct if verdict.is_correct is not None else (verdict.reward or 0.0) > 0
        reason = (
            TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
            if output.finish_reason == "length"
            else TerminationReason.ENV_DONE
        )
        return Episode(task=task, trajectories=[trajectory], is_correct=is_correct, termination_reason=reason)


def messages_of(task: Task, system_prompt: str | None = None) -> list[Message]:
    """Return the messages that put a task to a model.

    Raises:
        ConfigError: if the task has no question.
    """
    head: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if task.get("messages"):
        return [*head, *task["messages"]]
    text = next((task[key] for key in TEXT_KEYS if task.get(key)), None)
    if text is None:
        raise ConfigError(f"the task has the fields {sorted(task)}: it needs one of messages, {', '.join(TEXT_KEYS)}")
    return [*head, {"role": "user", "content": str(text)}]
