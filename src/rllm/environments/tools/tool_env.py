"""`ToolEnvironment`: a task that is solved by calling tools, until the agent answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from rllm._runtime.threads import in_thread
from rllm.environments.base.action import unwrapped
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.from_task import check_reward_fn, named_code, refuse_code, split_row
from rllm.environments.tools.calls import final_answer, read_calls
from rllm.errors import ConfigError, EnvError
from rllm.rewards.scoring import as_reward_output
from rllm.tools.multi_tool import MultiTool
from rllm.tools.tool_base import Tool, ToolCall, ToolOutput

logger = logging.getLogger(__name__)

_SETTINGS = ("tools", "tool_map", "max_steps", "tool_timeout_s")


class ToolEnvironment(BaseEnv):
    """Runs the calls of a turn at the same time; a text, or a call of `finish`, is the answer and ends the rollout.

    The observation is `{"tool_outputs": {call_id: text}}`. A call that fails, or is not over by its deadline, is answered
    with an error that names the tool; `info["tool_errors"]` has these too. Turns before the last are unscored. Step
    `max_steps` ends the rollout (`info["truncated"]`), and its calls are not made: nobody would read what they return.
    """

    def __init__(
        self,
        task: Any = None,
        tools: Sequence[Tool | str | Callable[..., Any]] | None = None,
        tool_map: Mapping[str, type[Tool]] | None = None,
        reward_fn: Callable[[Any, Any], Any] | None = None,
        max_steps: int = 10,
        *,
        tool_timeout_s: float = 60.0,
    ) -> None:
        """Make the tools.

        Args:
            task: the first observation, and what the reward function is given.
            tools: each a tool, a function or a name, as `MultiTool` takes them.
            tool_map: names to tool classes, in place of `tools`.
            reward_fn: `reward_fn(task, answer)` scores the answer, `""` if there was none; without it, it stays unscored.
            max_steps: turns, the one with the answer included.
            tool_timeout_s: seconds that each call may take.

        Raises:
            ConfigError: if both `tools` and `tool_map` are given, a tool cannot be made, or a limit is not above 0.
        """
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps!r}: use at least 1")
        if tool_timeout_s <= 0:
            raise ConfigError(f"tool_timeout_s={tool_timeout_s!r}: use a number of seconds above 0")
        self.task = task
        self.tools = MultiTool(tools, tool_map)
        self.reward_fn = reward_fn
        self.max_steps = max_steps
        self.tool_timeout_s = tool_timeout_s
        self.num_steps = 0
        self.done = False

    prepare_args = staticmethod(named_code)

    @classmethod
    def from_dict(cls, info: Mapping[str, Any]) -> Self:
        """Return the environment of a row: its settings by their names, and its `task` or else all the rest of it.

        `tools` of a row are short names of registered tools, or tools and functions that Python code put there.

        Raises:
            ConfigError: if there is no `reward_fn`, or for what the constructor refuses.
        """
        settings = {key: info[key] for key in _SETTINGS if info.get(key) is not None}
        for tool in settings.get("tools") or ():
            if isinstance(tool, str) and ":" in tool:
                refuse_code("tools", tool)
        rest = {key: value for key, value in info.items() if key not in _SETTINGS}
        task, judge = split_row(rest)
        env = cls(task, **judge, **settings)
        check_reward_fn(env)
        return env

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begin anew; the observation is the task."""
        self.num_steps = 0
        self.done = False
        return (self.task if self.task is not None else {}), {}

    async def step(self, action: Any) -> tuple[Any, float | None, bool, dict[str, Any]]:  # type: ignore[override]
        """Make the calls, or score the answer.

        Raises:
            AgentError: if the action is neither text nor tool calls.
            EnvError: if the rollout is over.
            RewardError: naming the reward function, if it raises or returns what is no reward.
        """
        if self.done:
            raise EnvError(f"ToolEnvironment.step: the rollout was over after step {self.num_steps}; call reset")
        action = unwrapped(action)
        calls = {} if isinstance(action, str) else read_calls(action)
        answer = final_answer(calls) if calls else (action or "")
        self.num_steps += 1
        truncated = answer is None and self.num_steps >= self.max_steps
        if answer is not None or truncated:
            return await self._score("" if answer is None else answer, truncated)
        outputs = await asyncio.gather(*(self._call(call) for call in calls.values()))
        by_id = dict(zip(calls, outputs, strict=True))
        errors = {call_id: output.error for call_id, output in by_id.items() if output.error is not None}
        observation = {"tool_outputs": {call_id: output.to_string() for call_id, output in by_id.items()}}
        return observation, None, False, {"tool_errors": errors} if errors else {}

    async def _call(self, call: ToolCall | ToolOutput) -> ToolOutput:
        if isinstance(call, ToolOutput):
            return call
        try:
            async with asyncio.timeout(self.tool_timeout_s):
                return await self.tools.call(call)
        except TimeoutError as late:
            error = f"tool {call.name!r} did not finish within {self.tool_timeout_s:g} s"
            logger.warning("%s", "\n".join([error, *getattr(late.__cause__, "__notes__", ())]))
            return ToolOutput(name=call.name, error=error)

    async def _score(self, answer: Any, truncated: bool) -> tuple[Any, float | None, bool, dict[str, Any]]:
        self.done = True
        info: dict[str, Any] = {"truncated": truncated}
        if self.reward_fn is None:
            return {}, None, True, info
        score = partial(as_reward_output, self.reward_fn, self.task, answer)
        verdict = await in_thread(score, name=f"reward function {self.reward_fn!r}")
        return {}, verdict.reward, True, info | {"is_correct": verdict.is_correct, "reward_metadata": verdict.metadata}
