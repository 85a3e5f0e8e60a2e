"""Keys by which a message is recognised when a client sends it back."""

from __future__ import annotations

import json
from typing import Any

from rllm.types import JSONMapping, Message, text_of

_NO_CONTENT = "[System: Empty message content sanitised to satisfy protocol]"
"""Content that LiteLLM sends to Anthropic's endpoint for a streamed answer that had tool calls only."""


def is_answer(message: Message) -> bool:
    """Return True for a message of the model."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def canonical(message: Message) -> tuple[str, ...]:
    """Return the parts of a message that must be equal for it to be the same message."""
    if not isinstance(message, dict):
        return (stable_text(message),)
    if not is_answer(message):
        return (str(message.get("role")), _content(message), str(message.get("tool_call_id")))
    return (*tool_key(message), *arguments_of(message))


def tool_key(answer: Message) -> tuple[str, ...]:
    """Return the parts of an answer that do not depend on how its arguments are written."""
    calls = (f"{item['function'].get('name')} {item.get('id') or ''}" for item in tool_calls_of(answer))
    return ("assistant", _own_content(answer), *calls)


def content_key(answer: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of a canonical answer that no client rewrites: tool calls without arguments, or else text."""
    num_calls = len(answer) // 2 - 1
    return answer[2 : 2 + num_calls] or answer


def arguments_of(answer: Message) -> list[str]:
    """Return the arguments of each tool call, as written."""
    return [
        arguments if isinstance(arguments, str) else stable_text(arguments)
        for arguments in (item["function"].get("arguments") for item in tool_calls_of(answer))
    ]


def same_json(written: str, now: str) -> bool:
    """Return True if arguments are equal as JSON."""
    return now == written or ((parsed := _parsed(written)) is not None and _parsed(now) == parsed)


def may_return_as(written: str, now: str) -> bool:
    """Return True if a client may send arguments back in this form: text that is not JSON comes back in any form."""
    return _parsed(written) is None or same_json(written, now)


def _content(message: Message) -> str:
    """Return the text of a message; other parts as JSON without the cache marks that clients move about."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return text_of(message)
    return stable_text(
        [
            {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
            for part in parts
        ]
    )


def without_content(answer: Message) -> Message | None:
    """Return an answer without the text beside its tool calls; `None` unless the ids of these identify it."""
    calls = tool_calls_of(answer)
    return {**answer, "content": None} if calls and all(item.get("id") for item in calls) else None


def has_content(message: Message) -> bool:
    """Return True if an answer has text beside its tool calls."""
    return bool(_own_content(message))


def _own_content(answer: Message) -> str:
    text = text_of(answer).strip()
    return "" if text == _NO_CONTENT else text


def has_reasoning(message: Message) -> bool:
    """Return True if an answer includes its reasoning."""
    return bool(reasoning_of(message))


def reasoning_of(message: Message) -> str:
    """Return the reasoning of an answer, without the white space around it."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "").strip()


def tool_calls_of(message: Message) -> list[JSONMapping]:
    """Return the well-formed tool calls of a message."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [item for item in calls if isinstance(item, dict) and isinstance(item.get("function"), dict)]


def _parsed(arguments: str) -> Any:
    """Return arguments as a value; `None` if they are not JSON, or nested too deep."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def stable_text(value: Any) -> str:
    """Return the same text for equal values."""
    return json.dumps(value, sort_keys=True, default=str)
