"""The turn loop of one agent in one environment, shared by all drivers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from rllm.agents.agent import BaseAgent
from rllm.capture import snapshot
from rllm.config.sampling import with_fixed_sampling
from rllm.environments.base.base_env import BaseEnv, step_method, unwrapped
from rllm.errors import AgentError, ConfigError, EnvError, PromptTooLongError, boundary, counted
from rllm.inference.engine import InferenceEngine, ModelOutput
from rllm.rewards.scoring import checked_reward, is_number
from rllm.types import UNSCORED, JSONMapping, JSONObject, Message, Step, TerminationReason, Trajectory, discounted
from rllm.workflows.environment import BlockingCalls

_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(frozen=True, kw_only=True)
class InteractionLimits:
    """Limits that end an interaction before the environment is done; lengths are tokens, counted by the engine."""

    max_steps: int = 5
    """Number of answers of the model."""
    max_prompt_length: int | None = None
    """Length of the first prompt; with `per_step`, of every prompt."""
    max_response_length: int | None = None
    """Length of everything after the first prompt, observations included; with `per_step`, of each answer."""
    per_step: bool = False

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_prompt_length", "max_response_length"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: use a whole number of at least 1")


@dataclass(kw_only=True)
class Interaction:
    """Agent, environment and model of a rollout, and its progress."""

    agent: BaseAgent
    env: BaseEnv
    engine: InferenceEngine
    limits: InteractionLimits
    calls: BlockingCalls
    sampling: JSONMapping = field(default_factory=dict)
    """Parameters of every model call, such as `temperature`."""
    seconds: dict[str, float] = field(default_factory=lambda: {"env": 0.0, "model": 0.0})
    warnings: list[str] = field(default_factory=list)
    """Problems that did not end the rollout."""
    _first: ModelOutput | None = None
    _last: ModelOutput | None = None
    _steps: list[Step] = field(default_factory=list)

    @property
    def trajectory(self) -> Trajectory:
        """Trajectory so far, as a separate object with a step for each answer, whatever the agent keeps.

        Raises:
            AgentError: if the agent has no trajectory.
        """
        with self._agent("trajectory"):
            own = self.agent.trajectory
            return replace(own, steps=list(self._steps), info=dict(own.info))

    async def run(self) -> TerminationReason:
        """Play from the environment's `reset`; the agent's trajectory has a complete step for each answer.

        Raises:
            AgentError: if the agent raises, or does not add a step.
            EnvError: if the environment raises, or returns wrong values.
            PromptTooLongError: if the first prompt is too long.
            InferenceError: if the model does not answer.
        """
        observation, info = await self._reset()
        with self._agent("reset"):
            self.agent.reset()
        self._update_agent(observation, 0.0, False, info)
        try:
            return await self._turns(observation)
        except PromptTooLongError:
            if not self._steps:
                raise
            return TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED

    async def _turns(self, observation: object) -> TerminationReason:
        """Play turn by turn; an answer beyond a limit is dropped."""
        done = False
        for _ in range(self.limits.max_steps):
            budget = self._budget()
            if budget is not None and budget < 1:
                return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
            messages, output = await self._ask(budget)
            if self._prompt_is_too_long(output):
                return TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
            if (remaining := self._budget()) is not None and remaining < 0:  # the observations alone exceed the limit
                return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
            if budget is not None and output.finish_reason == "length" and _num_sampled(output) >= budget:
                step = Step.from_model_output(output, messages)  # without an action or a reward
                step.observation, step.reward, step.done = observation, 0.0, True
                self._steps.append(step)
                return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
            action = self._decide(output, messages, observation)
            observation, done = await self._act(action)
            if done:
                break
        return self._reason(done)

    def _reason(self, done: bool) -> TerminationReason:
        """Return the reason of the end; a truncated answer counts as a limit even if the task is done."""
        truncated = self._steps[-1].info.get("truncated")
        if self._steps[-1].finish_reason == "length":
            return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
        if not done or (is_number(truncated) and truncated):
            return TerminationReason.MAX_TURNS_EXCEEDED
        return TerminationReason.ENV_DONE

    async def _reset(self) -> tuple[Any, JSONObject]:
        returned = await self._env("reset")
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise EnvError(f"{self._env_name}.reset returned {_shape(returned)}: return (observation, info)")
        observation, info = returned
        self._check_observation(observation)
        return observation, _info(info, f"{self._env_name}.reset")

    async def _ask(self, budget: int | None) -> tuple[list[Message], ModelOutput]:
        with self._agent("chat_completions"):
            messages = list(self.agent.chat_completions)
            tools = getattr(self.agent, "tool_schemas", None)
        if not messages:
            raise AgentError(f"{self._agent_name}.chat_completions is empty: update_from_env must add a message")
        params = with_fixed_sampling(self.sampling, {} if budget is None else {"max_tokens": budget})
        started = time.perf_counter()
        with boundary(AgentError, f"asking the model with {self._agent_name}.chat_completions"):
            output = await self.engine.get_model_response(messages, tools=tools, **params)
        self.seconds["model"] += time.perf_counter() - started
        self._first, self._last = self._first or output, output
        return messages, output

    def _decide(self, output: ModelOutput, messages: list[Message], observation: object) -> Any:
        """Return the agent's action, and complete its step with the tokens."""
        with self._agent("update_from_model"):
            action = self.agent.update_from_model(output.text)
            step = self.agent.get_current_state()
        if not isinstance(step, Step) or any(step is done for done in self._steps):
            raise AgentError(
                f"{self._agent_name}.update_from_model added no step: append one Step to the trajectory for each answer"
            )
        if action is None:
            raise AgentError(
                f"{self._agent_name}.update_from_model returned None: return the Action that the environment is to take"
            )
        with boundary(AgentError, f"completing the step of {self._agent_name}"):
            step.fill_from_output(output)
            # A copy, because many agents put in one list that they keep changing.
            step.chat_completions = snapshot(list(step.chat_completions or [*messages, output.to_message()]))
        step.observation = observation if step.observation is None else step.observation
        self._steps.append(step)
        return unwrapped(action)

    async def _act(self, action: object) -> tuple[Any, bool]:
        returned = await self._env("step", action)
        where = f"{self._env_name}.step"
        if not isinstance(returned, tuple | list) or len(returned) != 4:
            remedy = "return (observation, reward, done, info)"
            if isinstance(returned, tuple | list) and len(returned) == 5:
                remedy += "; for a Gymnasium environment use rllm.environments.gymnasium_env.GymnasiumEnv"
            raise EnvError(f"{where} returned {_shape(returned)}: {remedy}")
        observation, reward, done, info = returned
        reward, info = checked_reward(reward, f"{where}, as the reward,", EnvError), _info(info, where)
        reward = UNSCORED if reward is None else reward  # users may sum the rewards of steps
        self._check_observation(observation)
        with boundary(EnvError, f"{where}, as done,"):
            done = bool(done)
        step = self._steps[-1]
        step.done = done
        self._update_agent(observation, reward, done, info)
        step.reward = reward
        with boundary(AgentError, f"completing the info of the step of {self._agent_name}"):
            step.info = {**(step.info or {}), **info}
        return observation, done

    def _update_agent(self, observation: object, reward: float, done: bool, info: JSONMapping) -> None:
        with self._agent("update_from_env"):
            self.agent.update_from_env(observation, reward, done, {"max_steps": self.limits.max_steps, **info})

    def _budget(self) -> int | None:
        """Return the number of tokens that the next answer may have."""
        limit = self.limits.max_response_length
        if limit is None or self.limits.per_step or self._first is None or self._last is None:
            return limit
        return limit - (_num_prompt(self._last) + _num_sampled(self._last) - _num_prompt(self._first))

    def _prompt_is_too_long(self, output: ModelOutput) -> bool:
        limit, length = self.limits.max_prompt_length, _num_prompt(output)
        if limit is None or length <= limit or not (self.limits.per_step or output is self._first):
            return False
        if not self._steps:
            raise PromptTooLongError(
                f"the first prompt has {length} tokens and max_prompt_length={limit}: shorten the task, or raise "
                "max_prompt_length"
            )
        return True

    async def _env(self, method: str, *args: object) -> Any:
        started = time.perf_counter()
        with boundary(EnvError, f"{self._env_name}.{method}"):
            function = step_method(self.env) if method == "step" else getattr(self.env, method)
            returned = await self.calls.call(function, *args, name=f"{self._env_name}.{method}")
        self.seconds["env"] += time.perf_counter() - started
        return returned

    def _agent(self, method: str) -> Any:
        return boundary(AgentError, f"{self._agent_name}.{method}")

    @property
    def _agent_name(self) -> str:
        return type(self.agent).__name__

    @property
    def _env_name(self) -> str:
        return type(self.env).__name__

    def _check_observation(self, observation: object) -> None:
        if isinstance(observation, str) or observation is None:
            return
        try:
            orjson.dumps(observation, option=_JSON)
        except TypeError as error:
            warning = (
                f"{self._env_name}: an observation of type {type(observation).__name__} cannot be kept as JSON "
                f"({error}): return text, numbers, lists and dicts"
            )
            if warning not in self.warnings:
                self.warnings.append(warning)


def discounted_returns(steps: list[Step], gamma: float) -> None:
    """Set each step's `mc_return`: its reward plus the discounted later ones; unscored steps count as 0."""
    for step, value in zip(steps, discounted([float(step.reward or 0.0) for step in steps], gamma), strict=True):
        step.mc_return = value


def _num_prompt(output: ModelOutput) -> int:
    return output.prompt_length or int(output.metrics.get("prompt_tokens", 0))


def _num_sampled(output: ModelOutput) -> int:
    return output.completion_length or int(output.metrics.get("completion_tokens", 0))


def _info(info: object, where: str) -> JSONObject:
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise EnvError(f"{where} returned the info {info!r:.100} of type {type(info).__name__}: return a dict")
    return dict(info)


def _shape(returned: object) -> str:
    if isinstance(returned, tuple | list):
        return counted(len(returned), "value")
    return f"{returned!r:.100} of type {type(returned).__name__}"
