"""`openenv:URL`: the environment of a running OpenEnv server, stepped through the package's own client.

An action is the model's text if the server's actions have a single text field, calls of tools if the server lists MCP
tools, and a JSON object otherwise.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, NoReturn, Self

from rllm._runtime.threads import run_in_own_loop
from rllm._runtime.untrusted import last_json
from rllm.agents.tool_agent import ToolAgent
from rllm.environments.base.base_env import BaseEnv, unwrapped
from rllm.environments.named import NamedEnvironment, take_seeded_tasks, take_whole_number, values_of
from rllm.environments.tools.tool_env import read_calls
from rllm.errors import ConfigError, EnvError
from rllm.tools.tool_base import Tool, ToolCall, ToolOutput
from rllm.types import JSONMapping, JSONObject

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0  # for a first reset
_SETTINGS = ("url", "seed", "reset_args", "action", "tools")


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the environment of a server, with one task for each seed, after it has been reset once.

    Args:
        name: the URL of the server, such as `http://127.0.0.1:8000`.
        params: `size` (100) and `seed` (0) of the tasks, whose seeds follow each other; `max_steps` (50); `parser`
            (qwen), the format of calls if there are tools (see `rllm.parser.tool_parser.TOOL_FORMATS`); others are
            arguments of the environment's `reset`, as JSON or text. A server ignores those that it does not know.

    Raises:
        ConfigError: if no server answers, or it does not reset.
    """
    own = dict(params)
    tasks, max_steps = take_seeded_tasks(name, own), take_whole_number(own, "max_steps", 50, least=1)
    action = _action_schema(name)
    # Servers of MCP tools have actions that call or list these, or the package's base class of all actions.
    has_tools = set(action.get("properties", {})) <= {"type", "tool_name", "arguments"}
    parser = own.pop("parser", "qwen") if has_tools else None
    env_args: JSONObject = {"url": name, "reset_args": values_of(own), "action": action, "tools": has_tools}
    tools = run_in_own_loop(_reset_once(OpenEnv(seed=tasks[0]["seed"], **env_args)))
    agent: JSONObject = {}
    if has_tools:
        agent_args: JSONObject = {"tools": tools, "parser_name": parser}
        ToolAgent(**agent_args)  # refuses an unknown format
        agent = {"agent_class": ToolAgent, "agent_args": agent_args}
    return NamedEnvironment(tasks=tasks, env_class=OpenEnv, env_args=env_args, max_steps=max_steps, **agent)


def _action_schema(url: str) -> JSONObject:
    """Return the JSON schema of the server's actions, without the metadata that all actions have."""
    import httpx

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not the URL of a server: use openenv:http://HOST:PORT")
    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=10.0, follow_redirects=True)
        schema = answer.raise_for_status().json()["action"]
        properties = {key: value for key, value in schema["properties"].items() if key != "metadata"}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"no OpenEnv server answers at {url} ({reason}): start it, or correct the URL") from error
    kept = {key: schema[key] for key in ("required", "$defs") if key in schema}
    return {"type": "object", "properties": properties, **kept}


async def _reset_once(env: OpenEnv) -> list[Tool]:
    """Reset the environment once and return its tools."""
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await env.reset()
            return await env.list_tools()
    except TimeoutError as error:
        raise ConfigError(f"the server at {env.url} did not reset within {OPEN_TIMEOUT_S:g} s") from error
    finally:
        await env.close()


class OpenEnv(BaseEnv):
    """Session of an OpenEnv server: a connection of its own, on which the server keeps one environment.

    A server serves as many sessions at once as its `max_concurrent_envs`; `reset` waits for a free one. The observation
    is the text of its only field, or else its fields as JSON; the info has metadata, and `state` at the end. An action
    that the server does not accept gets an explanation and a reward of 0, and is counted in `num_invalid_actions`. With
    tools, a text without calls ends the rollout and earns 0. Methods are `async`.
    """

    def __init__(self, url: str, seed: int, reset_args: JSONMapping, action: JSONMapping, tools: bool) -> None:
        """Create the client, which connects at `reset`; `action` is the JSON schema of the server's actions."""
        from openenv.core import GenericEnvClient

        self.url = url
        self._client: Any = GenericEnvClient(url)
        self._connection: Any = None
        self._arguments = {"seed": seed, **reset_args}
        self._tools = tools
        self._text_field, self._how_to_act = (None, "") if tools else _action_format(action)
        self._num_invalid_actions = 0

    @classmethod
    def from_dict(cls, info: JSONMapping) -> Self:
        """Return the environment of a row of `open_env`."""
        return cls(**{key: info[key] for key in _SETTINGS})

    @classmethod
    def argument_names(cls) -> Collection[str]:
        """Return the constructor's arguments."""
        return _SETTINGS

    async def list_tools(self) -> list[Tool]:
        """Return the server's tools, for an agent to describe; calls of them are steps of the environment."""
        if not self._tools:
            return []
        result = await self._ask("the list of tools", lambda: self._client.step({"type": "list_tools"}))
        return [
            Tool(tool["name"], tool["description"] or "-", _refuse_to_call, parameters=tool["input_schema"])
            for tool in result.observation["tools"]
        ]

    async def reset(self) -> tuple[str, JSONObject]:  # type: ignore[override]
        """Start a new rollout; raise `EnvError` if the server is gone or its environment raises."""
        self._num_invalid_actions = 0
        result = await self._ask("reset", lambda: self._client.reset(**self._arguments))
        self._connection = self._client._ws
        return f"{_text_of(result.observation)}\n\n{self._how_to_act}".strip(), await self._info(result)

    async def step(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:  # type: ignore[override]
        """Perform the action in the model's text, or its calls of tools; raise `EnvError` as `reset` does."""
        action = unwrapped(action)
        if self._tools:
            return await self._call_tools(action)
        try:
            result = await self._perform(self._payload(action))
        except ValueError as reason:
            self._num_invalid_actions += 1
            message = f"Invalid action: {reason}. Nothing happened. {self._how_to_act}".strip()
            return message, 0.0, False, {"num_invalid_actions": self._num_invalid_actions}
        return _text_of(result.observation), result.reward, result.done, await self._info(result)

    async def close(self) -> None:  # type: ignore[override]
        """End the session."""
        await self._client.close()

    def _payload(self, action: Any) -> JSONObject:
        """Return the server's action; raise `ValueError` if the text has none."""
        if isinstance(action, str) and self._text_field:
            return {self._text_field: action.strip()}
        action = last_json(action) if isinstance(action, str) else action
        if isinstance(action, Mapping):
            return dict(action)
        raise ValueError("the answer holds no JSON object")

    async def _call_tools(self, action: Any) -> tuple[Any, float | None, bool, JSONObject]:
        """Make the calls, one after another, until one ends the rollout; the reward is the sum of theirs."""
        outputs: dict[str, str] = {}
        info: JSONObject = {}
        done = isinstance(action, str)
        rewards: list[float] = [0.0] if done else []
        for call_id, call in ({} if done else read_calls(action)).items():
            output = call
            if isinstance(call, ToolCall):
                payload = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                result = await self._perform(payload)
                output = _output_of(call.name, result.observation)
                rewards += [] if result.reward is None else [result.reward]
                info, done = await self._info(result), result.done
            outputs[call_id] = str(output)
            if done:
                break
        return {"tool_outputs": outputs}, sum(rewards) if rewards else None, done, info

    async def _perform(self, payload: JSONObject) -> Any:
        """Step the environment; raise `ValueError` if the server does not accept the action."""
        # The client would silently connect again, to a new environment that has not been reset.
        if self._connection is None or self._connection.close_code is not None:
            raise self._error("has closed the connection") from ConnectionError()
        return await self._ask("step", lambda: self._client.step(payload))

    async def _ask(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the server's answer; wait as long as all of its sessions are in use."""
        while True:
            try:
                return await call()
            except RuntimeError as error:  # an answer: "Server error: ... (code: ...)"
                reason = str(error).removeprefix("Server error: ")
                if what == "step" and "VALIDATION_ERROR" in reason:
                    raise ValueError("the server does not accept it") from error
                if "CAPACITY_REACHED" not in reason:
                    raise self._error(f"answered {what} with an error: {reason}") from error
                _log_full(self.url)
            except TimeoutError as error:
                raise self._error(f"did not answer {what}") from error
            except Exception as error:  # of the package websockets; a retry may find the server restarted
                raise self._error(f"closed the connection during {what}: {error}") from ConnectionError()
            await self._client.disconnect()
            await asyncio.sleep(0.2)

    def _error(self, problem: str) -> EnvError:
        return EnvError(f"the OpenEnv server at {self.url} {problem}")

    async def _info(self, result: Any) -> JSONObject:
        state = {"state": await self._ask("state", self._client.state)} if result.done else {}
        return {**(result.metadata or {}), "num_invalid_actions": self._num_invalid_actions, **state}


@lru_cache(maxsize=64)  # logs once
def _log_full(url: str) -> None:
    logger.warning("%s: all sessions are in use, so rollouts wait: start it with a larger max_concurrent_envs", url)


def _refuse_to_call(**arguments: Any) -> NoReturn:
    raise EnvError("tools of an OpenEnv server are called by `OpenEnv.step`, to which an agent passes the calls")


def _action_format(action: JSONMapping) -> tuple[str | None, str]:
    """Return the only field of the actions if it is a text, and the instruction that the model gets."""
    (name, field), *others = action["properties"].items()
    if others or field.get("type") != "string":
        return None, f"Answer with your next action, one JSON object of this schema:\n{json.dumps(action)}"
    return name, f"Answer with one of: {', '.join(field['enum'])}" if "enum" in field else ""


def _text_of(observation: JSONMapping) -> str:
    shown = {key: value for key, value in observation.items() if key != "metadata" and value is not None}
    only = next(iter(shown.values())) if len(shown) == 1 else None
    return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False) if shown else ""


def _output_of(name: str, observation: JSONMapping) -> ToolOutput:
    error, result = observation.get("error"), observation.get("result")
    if error:
        return ToolOutput(name, error=str(error.get("message", error)) if isinstance(error, Mapping) else str(error))
    return ToolOutput(name, result["data"] if isinstance(result, Mapping) and "data" in result else result)
