"""What a trace says about its call beyond tokens and texts: which agent of a program made it, whether beside its task, and what its
server counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.capture import side_call
from rllm.gateway.dialects.base import usage_of
from rllm.gateway.sessions import Session
from rllm.types import SIDE_CALL_KEY

USAGE_KEY = "rllm.usage"
"""In a trace's metadata: the usage that its server told, where the trace's own tokens do not say the same."""

_KEPT = {b"x-claude-code-agent-id": "x-claude-code-agent-id", b"x-parent-session-id": "x-parent-session-id"}
"""Headers by which programs name the sub-agent that calls, and the session that it belongs to."""


def notes_of(
    chat: Mapping[str, Any], session: Session, headers: Mapping[bytes, bytes], *, is_own: bool
) -> dict[str, Any]:
    """The metadata of a call, mostly none. The session remembers that it had tools.

    `is_own`: the author's own code made it.
    """
    notes: dict[str, Any] = {
        name: headers[header].decode("latin-1") for header, name in _KEPT.items() if header in headers
    }
    if reason := side_call(chat, session_has_tools=session.has_tools, is_own=is_own):
        notes[SIDE_CALL_KEY] = reason
    elif chat.get("tools"):
        session.has_tools = True
    return notes


def usage_notes(response: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an answer, none where its usage can be counted again, and no token was cached or thought."""
    counted = usage_of({**response, "usage": None})
    return {} if usage_of(response) == counted else {USAGE_KEY: response["usage"]}
