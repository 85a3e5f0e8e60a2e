"""Messages as chat templates take them: no `developer`, and one system message at the beginning.

Only what is rendered is changed. A trace keeps the messages as the agent wrote them, by which it finds its calls again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllm.types import Message


def for_template(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with every `developer` called `system`, and with the leading system messages made one.

    Templates know `system` only; some raise at a second one, and some pass over it without a word.
    """
    before = None
    for message in messages:
        role = message["role"]
        if role == "developer" or role == before == "system":
            break
        before = role
    else:
        return messages
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    num_leading = next((k for k, message in enumerate(renamed) if message["role"] != "system"), len(renamed))
    if num_leading < 2:
        return renamed
    content = _joined([message.get("content") for message in renamed[:num_leading]])
    return [{**renamed[0], "content": content}, *renamed[num_leading:]]


def _joined(contents: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Texts as paragraphs of one text; where there are parts, all as parts."""
    if all(content is None or isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if content)
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content or [])
    ]
