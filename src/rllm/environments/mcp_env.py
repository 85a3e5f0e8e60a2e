"""`mcp:COMMAND_OR_URL?tasks=FILE`: questions of a file, answered with the tools of an MCP server."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rllm._runtime.threads import run_in_own_loop
from rllm.agents.chat_agent import QUESTION_KEYS
from rllm.agents.tool_agent import ToolAgent
from rllm.data.dataset import Dataset
from rllm.environments.named import NamedEnvironment, refuse_unknown, take_whole_number
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.errors import ConfigError
from rllm.tools.mcp_tool import MCPServer, shared_connection, tools_of
from rllm.types import JSONObject

EXACT_ANSWER = "rllm.rewards.reward_fn:search_reward_fn"
"""Default reward: compares the answer with the row's `answer` or `ground_truth`, as short answers."""


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the tasks of a file, with the tools of a server. One connection serves all rollouts of a process.

    Args:
        name: the server's command line, such as `python server.py`, or its URL.
        params: `tasks`, a file of rows with a `question`; `reward`, a `package.module:function` of (task, answer) in
            place of `EXACT_ANSWER`; `max_steps` (10), answers of the model, the last one included; and `parser` (qwen),
            the format of its calls, a name of `rllm.parser.tool_parser.TOOL_FORMATS`.

    Raises:
        ConfigError: if the server cannot be started or reached, or a parameter or a row is refused.
    """
    refuse_unknown(params, ("tasks", "reward", "max_steps", "parser"))
    max_steps = take_whole_number(dict(params), "max_steps", 10, least=1)
    if not params.get("tasks"):
        raise ConfigError("tasks is missing: name a file with one task a line, as in mcp:COMMAND?tasks=tasks.jsonl")
    tasks = Dataset.load(params["tasks"])
    reward = params.get("reward", EXACT_ANSWER)
    for index, row in enumerate(tasks):
        place = f"row {index} of {params['tasks']}"
        if not any(row.get(key) for key in QUESTION_KEYS):
            raise ConfigError(f"{place} has no question: add one of {', '.join(QUESTION_KEYS)}")
        if reward == EXACT_ANSWER and all(row.get(key) is None for key in ("ground_truth", "answer")):
            raise ConfigError(f"{place} has no answer: add `answer`, or name reward=module:function")
    env_args = ToolEnvironment.prepare_args({"reward_fn": reward, "max_steps": max_steps})
    tools = run_in_own_loop(tools_of(shared_connection(_server(name))))
    agent_args: JSONObject = {"tools": tools, "parser_name": params.get("parser", "qwen")}
    ToolAgent(**agent_args)  # refuses an unknown format
    return NamedEnvironment(
        tasks=tasks,
        env_class=ToolEnvironment,
        env_args={**env_args, "tools": tools},
        agent_class=ToolAgent,
        agent_args=agent_args,
        max_steps=max_steps,
    )


def _server(name: str) -> MCPServer:
    if name.startswith(("http://", "https://")):
        return MCPServer(url=name)
    try:
        command, *args = shlex.split(name)
    except ValueError as error:
        raise ConfigError(f"{name!r} is not a command line: {error}") from error
    return MCPServer(command=command, args=args)
