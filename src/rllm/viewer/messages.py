"""Chat messages, prepared for display."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

_SHORT = 80
"""Longest JSON on one line."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class MessageParts:
    """One message."""

    role: str
    kind: str
    """Its class in the style sheet."""
    name: str = ""
    text: str = ""
    reasoning: str = ""
    tools: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each tool call."""


def message_parts(message: object) -> MessageParts:
    """Split a message into parts; a value that is not a message becomes text."""
    if not isinstance(message, Mapping):
        return MessageParts(role="?", kind="other", text=pretty(message))
    role = str(message.get("role") or "?")
    text = _text(message.get("content"))
    calls = message.get("tool_calls")
    return MessageParts(
        role=role,
        kind=role if role in _ROLES else "other",
        name=str(message.get("name") or ""),
        text=pretty(text) if role == "tool" else text,
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        tools=[_call(call) for call in calls] if isinstance(calls, list) else [],
    )


def fields_of(task: object) -> dict[str, str]:
    """Return the fields of a task; a task without fields is one field."""
    fields = task if isinstance(task, Mapping) else {} if task is None else {"task": task}
    return {str(name): value if isinstance(value, str) else pretty(_on_a_line(value)) for name, value in fields.items()}


def pretty(value: object) -> str:
    """Indent arguments and results that are JSON."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if not isinstance(found, dict | list) or len(value) < _SHORT:
            return value
        value = found
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _on_a_line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return pretty(content)


def _part(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type", "part") if isinstance(part, Mapping) else type(part).__name__
    return f"[{kind}]"


def _call(call: object) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "?", pretty(call)
    return str(function.get("name")), pretty(function.get("arguments"))
