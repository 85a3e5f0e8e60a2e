"""What a trace says about its call beyond tokens and texts: which agent of a program made it, and whether beside its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.capture import side_call
from rllm.gateway.sessions import Session
from rllm.types import SIDE_CALL_KEY

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
