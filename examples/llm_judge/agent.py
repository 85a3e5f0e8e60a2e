"""A receptionist: one question, one model call. The reply is returned, and a judge scores it."""

from typing import Any

from rllm.sdk import get_chat_client

client = get_chat_client()


def greet(guest: str) -> str:
    """Return the reply to a guest, such as `Ann, morning`."""
    messages: Any = [{"role": "user", "content": guest}]
    response = client.chat.completions.create(model="policy", messages=messages)
    return response.choices[0].message.content or ""
