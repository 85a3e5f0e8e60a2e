"""What an agent asks for, in any of the usual forms, to tool calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import AgentError
from rllm.tools.tool_base import ToolCall, ToolOutput

FINISH = "finish"
"""A call of this name ends the rollout; its argument `response` is the answer."""


def read_calls(action: Any) -> dict[str, ToolCall | ToolOutput]:
    """Each call by its id; what cannot be read as a call is the error output that answers it.

    `action` is a list, or one item of it: OpenAI tool calls, mappings of `name` and `arguments`, or `ToolCall`s.
    Arguments may be JSON text. Calls without an id get one of their own, and so do those whose id is taken.

    Raises:
        AgentError: if the action is neither.
    """
    items = [action] if isinstance(action, Mapping | ToolCall) else action
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise AgentError(
            f"the agent's action is {action!r:.200}: a ToolEnvironment takes the final answer as text, or a list of tool calls"
        )
    given = [str(item.get("id") or "") if isinstance(item, Mapping) else "" for item in items]
    calls: dict[str, ToolCall | ToolOutput] = {}
    for index, (call_id, item) in enumerate(zip(given, items, strict=True)):
        if not call_id or call_id in calls:
            numbered = (f"call_{number}" for number in itertools.count(index))
            call_id = next(new_id for new_id in numbered if new_id not in calls and new_id not in given)
        calls[call_id] = _read(item)
    return calls


def final_answer(calls: Mapping[str, ToolCall | ToolOutput]) -> Any:
    """What a call of `finish` says: its `response`, or else all of its arguments; `None` if there is no such call."""
    for call in calls.values():
        if isinstance(call, ToolCall) and call.name == FINISH:
            answer = call.arguments.get("response", call.arguments)
            return "" if answer is None else answer
    return None


def _read(item: Any) -> ToolCall | ToolOutput:
    if isinstance(item, ToolCall):
        return item
    function = item.get("function", item) if isinstance(item, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        return ToolOutput(name="", error=f"{item!r:.200} is no tool call: it needs a name and arguments")
    arguments = function.get("arguments") or {}
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return ToolOutput(name=name, error=f"the arguments of tool {name!r} are not JSON ({error}): {arguments[:200]}")
    if not isinstance(parsed, Mapping):
        return ToolOutput(name=name, error=f"the arguments of tool {name!r} are no JSON object: {parsed!r:.200}")
    return ToolCall(name, dict(parsed))
