"""The reward for function calls: each accepted call is made once, and no other.

Values are compared as the Berkeley Function-Calling Leaderboard does (its comparison of syntax trees):
https://gorilla.cs.berkeley.edu/blogs/8_berkeley_function_calling_leaderboard.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.reward_types import RewardOutput, field_of
from rllm.types import JSONMapping, Task

NAME = "the function-call reward"
OPTIONAL = ""
"""Accepted value that means: the argument may be left out."""

_TYPES: Mapping[object, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_IGNORED = re.compile(r"[ ,./\-_*^]")
"""Characters that do not matter in texts: dates and names are written in many ways."""


def function_call_reward_fn(task_info: Task, action: object) -> RewardOutput:
    """Return 1.0 if the calls are the accepted ones, in any order, else 0.0.

    The action is a list of `{"name": ..., "arguments": {...}}`; a text makes no call. The task has `tools`, schemas in
    OpenAI's format, and as `ground_truth` a list of calls `{name: {argument: [accepted values]}}`, empty if no call is
    right. The metadata has the result under the task's `category`.

    Raises:
        RewardError: if the task lacks `tools` or `ground_truth`.
    """
    accepted: list[JSONMapping] = field_of(task_info, "ground_truth", reward=NAME)
    tools: list[JSONMapping] = field_of(task_info, "tools", reward=NAME)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = list(action) if isinstance(action, list | tuple) else []
    fault = _fault(calls, accepted, schemas)
    is_correct = fault is None
    category = str(task_info.get("category") or "calls")
    reason = {} if is_correct else {"reason": fault}
    return RewardOutput(float(is_correct), {category: float(is_correct), **reason}, is_correct)


def _fault(calls: list[JSONMapping], accepted: Sequence[JSONMapping], schemas: JSONMapping) -> str | None:
    """Return why calls are wrong; `None` if they are right."""
    if len(calls) != len(accepted):
        return f"{len(calls)} calls instead of {len(accepted)}"
    for expected in accepted:
        [(name, values)] = expected.items()
        if name not in schemas:
            raise RewardError(f"{NAME} needs the tool {name!r} of the accepted call; the task has {', '.join(schemas)}")
        places = (place for place, call in enumerate(calls) if _is_accepted(call, name, values, schemas[name]))
        match = next(places, None)
        if match is None:
            return f"no call is an accepted one of {name}"
        del calls[match]
    return None


def _is_accepted(call: JSONMapping, name: str, values: JSONMapping, schema: JSONMapping) -> bool:
    arguments, properties = call.get("arguments"), schema.get("properties", {})
    if call.get("name") != name or not isinstance(arguments, Mapping):
        return False
    required = {*schema.get("required", ()), *(item for item, allowed in values.items() if OPTIONAL not in allowed)}
    return required <= arguments.keys() <= properties.keys() & values.keys() and all(
        _is_value(value, values[item], properties[item]) for item, value in arguments.items()
    )


def _is_value(value: Any, allowed: Sequence[Any], schema: JSONMapping) -> bool:
    """Return whether an argument has the schema's type or the accepted values' type, and is one of these values."""
    kind = _TYPES.get(schema.get("type"), str)
    if kind is float and type(value) is int:
        value = float(value)
    inner = schema.get("items")
    item_kind = _TYPES.get(inner.get("type"), str) if kind is list and isinstance(inner, Mapping) else None
    given_kind = _kind_of(allowed)
    if type(value) is not kind or given_kind not in (None, kind):  # the name of a variable, in most cases
        return type(value) in (kind, given_kind) and value in allowed
    if item_kind is not None and not _has_items(value, allowed, item_kind):
        return False
    if kind is dict:
        return any(_is_object(value, item) for item in allowed if item != OPTIONAL)
    if item_kind is dict:
        return any(_are_objects(value, item) for item in allowed)
    if kind is list and not value and OPTIONAL in allowed:
        return True
    return _plain(value) in [_plain(item) for item in allowed]


def _kind_of(allowed: Sequence[Any]) -> type | None:
    """Return the type of the first accepted value."""
    return next((type(item) for item in allowed if item != OPTIONAL), None)


def _has_items(value: Any, allowed: Sequence[Any], kind: type) -> bool:
    """Return whether all items have the schema's type, or the item type of one accepted list."""
    return any(
        all(type(item) in (kind, _kind_of(accepted)) for item in value) if isinstance(accepted, list) else True
        for accepted in allowed
    )


def _is_object(value: Any, accepted: JSONMapping) -> bool:
    """Return whether an object has accepted values in all fields, and lacks optional ones only."""
    return (
        isinstance(value, Mapping)
        and value.keys() <= accepted.keys()
        and all(_plain(item) in [_plain(allowed) for allowed in accepted[name]] for name, item in value.items())
        and all(name in value or OPTIONAL in allowed for name, allowed in accepted.items())
    )


def _are_objects(value: Any, accepted: Any) -> bool:
    return (
        isinstance(accepted, list)
        and len(value) == len(accepted)
        and all(_is_object(one, other) for one, other in zip(value, accepted, strict=True))
    )


def _plain(value: Any) -> Any:
    """Return a text, or a list of texts, without characters that do not matter."""
    if isinstance(value, list):
        return [_plain(item) if isinstance(item, str) else item for item in value]
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
