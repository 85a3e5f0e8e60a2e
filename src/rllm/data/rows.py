"""Rows: what one may be, in memory and in a file that keeps it without loss."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError, shown
from rllm.types import Task

_ATOMS = (type(None), bool, int, float, str)
CHAT_FIELDS = ("messages", "tools")
"""Fields of a row that hold a chat."""
_JSON_TEXT = re.compile(r'\s*(?:\[\s*(?:[{\]"]|$)|\{\s*["}]|null\s*$)')
"""The beginning of a text that was meant as JSON: a task may have other texts in fields of these names."""


def as_task(row: Any, where: str) -> Task:
    """Return a copy of the row as a dict, chats that are given as JSON text read.

    Raises:
        ConfigError: if it is not a mapping, or if such text is not JSON; the message begins with `where`.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {shown(row)}: use an object with a field for each argument")
    task = dict(row)
    for field in CHAT_FIELDS:
        if task.get(field) is not None:
            task[field] = _read_chat(task[field], f"{where}: {field}")
    return task


def _read_chat(value: Any, where: str) -> Any:
    """Return the messages or tools that a row holds, those read that are JSON text; another value as it is."""
    items = _read(value, where, list) if isinstance(value, str) else value
    if not isinstance(items, list):
        return items
    return [_read_item(item, f"{where}[{place}]") for place, item in enumerate(items)]


def _read_item(item: Any, where: str) -> Any:
    """Return a message or a tool. The arguments of a call stay the text that they are in OpenAI's format."""
    item = _read(item, where, dict) if isinstance(item, str) else item
    if not isinstance(item, dict):
        return item
    texts = {
        field: kind
        for field, kind in (("tool_calls", list), ("function", dict), ("parameters", dict), ("input_schema", dict))
        if isinstance(item.get(field), str)
    }
    item = item | {field: _read(item[field], f"{where}.{field}", kind) for field, kind in texts.items()}
    if isinstance(item.get("tool_calls"), list):
        calls = enumerate(item["tool_calls"])
        item = item | {"tool_calls": [_read_item(call, f"{where}.tool_calls[{place}]") for place, call in calls]}
    if isinstance(item.get("function"), dict):
        item = item | {"function": _read_item(item["function"], f"{where}.function")}
    return item


def _read(text: str, where: str, kind: type) -> Any:
    """Return what a JSON text holds, a list or an object, or the text itself where it was not meant as JSON."""
    if not _JSON_TEXT.match(text):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}={shown(text)} is not valid JSON: {error}; give it as JSON text or as it is"
        ) from error
    if not isinstance(value, kind | None):
        held, wanted = ("an object", "a list") if kind is list else ("a list", "an object")
        raise ConfigError(f"{where}={shown(text)} is the JSON text of {held}: use {wanted}")
    return value


def json_value(value: Any, where: str) -> Any:
    """Return the value in JSON's own types: numpy's numbers and arrays as numbers and lists, tuples as lists.

    Raises:
        ConfigError: if JSON cannot hold it; the message begins with `where`, extended by the path inside the value.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Mapping):
        unnamed = next((key for key in value if type(key) is not str), None)
        if unnamed is not None:
            raise ConfigError(f"{where} has the key {unnamed!r}: JSON has only text for keys, so use {str(unnamed)!r}")
        return {key: json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return json_value(value.tolist(), where)
    raise ConfigError(
        f"{where} is {shown(value)}, and JSON has nothing of type {type(value).__name__!r}: "
        "make it text, a number, a list or an object"
    )
