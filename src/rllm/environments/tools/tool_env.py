"""`ToolEnvironment`: a task that is solved by calling tools until the agent answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rllm._runtime.threads import run_in_own_loop
from rllm.environments.base.base_env import (
    BaseEnv,
    check_reward_fn,
    load_named_code,
    refuse_code,
    split_row,
    unwrapped,
)
from rllm.errors import AgentError, ConfigError, EnvError
from rllm.rewards.scoring import info_of, score
from rllm.tools.multi_tool import MultiTool
from rllm.tools.tool_base import Tool, ToolCall, ToolOutput
from rllm.types import JSONMapping, JSONObject

logger = logging.getLogger(__name__)

FINISH = "finish"
"""Name of the call that ends the rollout; its argument `response` is the answer."""
_SETTINGS = ("tools", "tool_map", "max_steps", "tool_timeout_s")


class ToolEnvironment(BaseEnv):
    """Runs the calls of a turn concurrently; a text, or a call of `finish`, is the answer and ends the rollout.

    The observation is `{"tool_outputs": {call_id: text}}`. A call that fails or exceeds its time limit is answered with
    an error that names the tool; `info["tool_errors"]` has these too. Only the last turn is scored. Step `max_steps`
    ends the rollout (`info["truncated"]`) without making its calls, whose results would not be read.
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
        """Create the tools.

        Args:
            task: the first observation, and the first argument of the reward function.
            tools: tools, functions or names, as `MultiTool` takes them.
            tool_map: names to tool classes, instead of `tools`.
            reward_fn: scores the answer as `reward_fn(task, answer)`, with `""` if there was none; without it, the
                rollout stays unscored.
            max_steps: turns, the one with the answer included.
            tool_timeout_s: seconds that each call may take.

        Raises:
            ConfigError: if both `tools` and `tool_map` are given, a tool cannot be created, or a limit is not positive.
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

    prepare_args = staticmethod(load_named_code)

    @classmethod
    def from_dict(cls, info: JSONMapping) -> Self:
        """Return the environment of a row: its settings by name, and its `task` or else the rest of the row.

        `tools` of a row are names of registered tools, or tools and functions that Python code put there.

        Raises:
            ConfigError: if there is no `reward_fn`, or the constructor refuses a setting.
        """
        settings = {key: info[key] for key in _SETTINGS if info.get(key) is not None}
        for tool in settings.get("tools") or ():
            if isinstance(tool, str) and ":" in tool:
                refuse_code("tools", tool)
        rest = {key: value for key, value in info.items() if key not in _SETTINGS}
        task, reward = split_row(rest)
        env = cls(task, **reward, **settings)
        check_reward_fn(env)
        return env

    @classmethod
    def check_task(cls, task: JSONMapping) -> None:
        """Raise `ConfigError` if the task has no usable `reward_fn`, or its settings are refused."""
        cls.from_dict(task)

    def reset(self) -> tuple[Any, JSONObject]:
        """Start a new rollout; the observation is the task."""
        self.num_steps = 0
        self.done = False
        return (self.task if self.task is not None else {}), {}

    def step(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:
        """Make the calls, or score the answer, and wait for it; see `async_step`.

        Each step runs in an event loop of its own, also if the calling thread has one already.
        """
        return run_in_own_loop(self.async_step(action))

    async def async_step(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:
        """Make the calls, or score the answer.

        Raises:
            AgentError: if the action is neither text nor tool calls.
            EnvError: if the rollout is over.
            RewardError: if the reward function raises or does not return a reward; the message names it.
        """
        if self.done:
            raise EnvError(f"ToolEnvironment.step: the rollout was over after step {self.num_steps}; call reset")
        action = unwrapped(action)
        calls = {} if isinstance(action, str) else read_calls(action)
        answer = _final_answer(calls) if calls else (action or "")
        self.num_steps += 1
        truncated = answer is None and self.num_steps >= self.max_steps
        if answer is not None or truncated:
            self.done = True
            info: JSONObject = {"truncated": truncated}
            if self.reward_fn is None:
                return {}, None, True, info
            verdict = await score(self.reward_fn, self.task, "" if answer is None else answer)
            return {}, verdict.reward, True, info | info_of(verdict)
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


def read_calls(action: object) -> dict[str, ToolCall | ToolOutput]:
    """Return each call by its id; an item that cannot be read as a call becomes an error output.

    `action` is a list, or one item of it: OpenAI tool calls, mappings of `name` and `arguments`, or `ToolCall`s.
    Arguments may be JSON text. Calls without an id, or with one that is taken, get a new one.
    """
    items = [action] if isinstance(action, Mapping | ToolCall) else action
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise AgentError(
            f"the agent's action is {action!r:.200}: a ToolEnvironment takes the final answer as text, or a "
            "list of tool calls"
        )
    given = [str(item.get("id") or "") if isinstance(item, Mapping) else "" for item in items]
    calls: dict[str, ToolCall | ToolOutput] = {}
    for index, (call_id, item) in enumerate(zip(given, items, strict=True)):
        if not call_id or call_id in calls:
            numbered = (f"call_{number}" for number in itertools.count(index))
            call_id = next(new_id for new_id in numbered if new_id not in calls and new_id not in given)
        calls[call_id] = _read_call(item)
    return calls


def _read_call(item: object) -> ToolCall | ToolOutput:
    if isinstance(item, ToolCall):
        return item
    function = item.get("function", item) if isinstance(item, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        return ToolOutput(name="", error=f"{item!r:.200} is not a tool call: it needs a name and arguments")
    arguments = function.get("arguments") or {}
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return ToolOutput(name=name, error=f"the arguments of tool {name!r} are not JSON ({error}): {arguments[:200]}")
    if not isinstance(parsed, Mapping):
        return ToolOutput(name=name, error=f"the arguments of tool {name!r} are not a JSON object: {parsed!r:.200}")
    return ToolCall(name, dict(parsed))


def _final_answer(calls: Mapping[str, ToolCall | ToolOutput]) -> Any:
    """Return the `response` of a call of `finish`, or else all of its arguments; `None` without such a call."""
    for call in calls.values():
        if isinstance(call, ToolCall) and call.name == FINISH:
            answer = call.arguments.get("response", call.arguments)
            return "" if answer is None else answer
    return None
