"""What of a message must be the same to be the same message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rllm.types import Message, text_of

_NO_CONTENT = "[System: Empty message content sanitised to satisfy protocol]"
"""What LiteLLM writes to Anthropic's endpoint where a streamed answer had tool calls only."""


def is_answer(message: Message) -> bool:
    """Whether the model said it."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def essence_of(message: Message) -> tuple[str, ...]:
    """What of a message is the same, where it is the same message and nobody wrote arguments otherwise."""
    if not isinstance(message, dict):
        return (as_text(message),)
    if not is_answer(message):
        return (str(message.get("role")), _content(message), str(message.get("tool_call_id")))
    return (*outline_of(message), *arguments_of(message))


def outline_of(answer: Message) -> tuple[str, ...]:
    """What of an answer is the same, however its arguments are written."""
    calls = (f"{item['function'].get('name')} {item.get('id') or ''}" for item in tool_calls_of(answer))
    return ("assistant", _own_content(answer), *calls)


def gist_of(essence: tuple[str, ...]) -> tuple[str, ...]:
    """What of an answer's essence no client writes otherwise: its tool calls without their arguments, or its text if it has none."""
    num_calls = len(essence) // 2 - 1
    return essence[2 : 2 + num_calls] or essence


def arguments_of(answer: Message) -> list[str]:
    """Those of each tool call, as written."""
    return [
        arguments if isinstance(arguments, str) else as_text(arguments)
        for arguments in (item["function"].get("arguments") for item in tool_calls_of(answer))
    ]


def same_json(written: str, now: str) -> bool:
    """Whether arguments are the same, but for the way in which JSON may be written otherwise."""
    return now == written or ((parsed := _parsed(written)) is not None and _parsed(now) == parsed)


def may_return_as(written: str, now: str) -> bool:
    """Whether a client may send arguments back as these: what is no JSON comes back in any form."""
    return _parsed(written) is None or same_json(written, now)


def _content(message: Message) -> str:
    """The text, whatever it came as; other parts as JSON without the marks that clients move about."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return text_of(message)
    return as_text(
        [
            {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
            for part in parts
        ]
    )


def without_content(answer: Message) -> Message | None:
    """Without what was said beside tool calls, if their ids tell whose they are all the same."""
    calls = tool_calls_of(answer)
    return {**answer, "content": None} if calls and all(item.get("id") for item in calls) else None


def has_content(message: Message) -> bool:
    """Whether an answer says something beside its tool calls."""
    return bool(_own_content(message))


def _own_content(answer: Message) -> str:
    """What the model said, without the white space around it."""
    text = text_of(answer).strip()
    return "" if text == _NO_CONTENT else text


def has_reasoning(message: Message) -> bool:
    """Whether an answer tells what was thought."""
    return bool(reasoning_of(message))


def reasoning_of(message: Message) -> str:
    """What was thought, without the white space around it."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "").strip()


def tool_calls_of(message: Message) -> list[Mapping[str, Any]]:
    """Those of them that can be read."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [item for item in calls if isinstance(item, dict) and isinstance(item.get("function"), dict)]


def _parsed(arguments: str) -> Any:
    """`None` if they are no JSON, or nested too deep to be read."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def as_text(value: Any) -> str:
    """The same for equal values."""
    return json.dumps(value, sort_keys=True, default=str)
