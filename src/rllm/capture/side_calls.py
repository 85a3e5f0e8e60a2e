"""Calls that an agent's program makes beside its task, such as asking for a title, told from those of the task.

Programs do not declare them. A call is a candidate if it asks for a title and nothing else, or if it has no tools and
begins a conversation of its own while other calls of the session have tools. It belongs to the task after all if a
call of the task continues its tokens, or has its answer in a message: a summary that replaces the history, a
sub-agent's result, a plan. See `quotes` for the comparison. An answer that comes back only in the messages of side
calls is one of theirs. A call that no call of the task follows belongs to it, too, if its messages quote an answer of
the task or a result of its tools: the program sums up what it found. A title of the whole conversation cannot be told
apart from that, and does no harm: its tokens have no part in the reward.

Calls of the author's own code, in this process or in one that knows its session, are of the task, with tools or
without: a tool may well ask the model something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.capture.quotes import LaterMessages
from rllm.types import SIDE_CALL_KEY, Message, Trace

OWN_KEY = "session_uids"
"""In the metadata of calls whose client names its session by itself."""
PROGRAM_KEY = "of_program"
"""In the metadata of calls of a program that was started in a session, which its clients were told to send along."""
TITLE = "title"
"""The answer was to be a title and nothing else."""
WITHOUT_TOOLS = "without tools"
"""The session's other calls have tools; this one has none, and begins a conversation of its own."""


def side_call(request: Mapping[str, Any], *, session_has_tools: bool, is_own: bool = False) -> str | None:
    """Why a chat request is a side call, as far as that can be known before the calls that follow it.

    `is_own`: the author's code made it, through a client that names its session by itself.
    """
    if is_own:
        return None
    if asks_for_title(request.get("response_format")):
        return TITLE
    if session_has_tools and not request.get("tools") and _begins(request["messages"]):
        return WITHOUT_TOOLS
    return None


def is_own(metadata: Mapping[str, Any]) -> bool:
    """Whether the author's own code made a call with this metadata."""
    return OWN_KEY in metadata and PROGRAM_KEY not in metadata


def side_calls(traces: Sequence[Trace]) -> dict[str, str]:
    """Return the ids of a session's side calls, each with the reason, `TITLE` or `WITHOUT_TOOLS`.

    There are none where all calls are alike.
    """
    aside = _candidates(traces)
    if not aside or len(aside) == len(traces):
        return {}
    calls = sorted(traces, key=lambda trace: trace.started_at)
    _keep_final_calls(aside, calls)
    later = LaterMessages(calls)
    parents: set[str | None] = set()
    for number in reversed(range(len(calls))):
        call = calls[number]
        if call.id in aside and (call.id in parents or later.have_answer_of(number)):
            del aside[call.id]
        if call.id not in aside:
            parents.add(call.parent_id)
            later.add(number)
    return aside


def _keep_final_calls(aside: dict[str, str], calls: Sequence[Trace]) -> None:
    """Remove from the candidates those after the last call of the task that quote it."""
    task = [number for number, call in enumerate(calls) if call.id not in aside]
    for number in range(task[-1] + 1, len(calls)):
        if aside[calls[number].id] == WITHOUT_TOOLS:
            final = LaterMessages(calls)
            final.add(number)
            if final.have_something_of(task):
                del aside[calls[number].id]


def _candidates(traces: Sequence[Trace]) -> dict[str, str]:
    has_tools = any(trace.tools for trace in traces)
    found: dict[str, str] = {}
    for trace in traces:
        if SIDE_CALL_KEY in trace.metadata:
            found[trace.id] = str(trace.metadata[SIDE_CALL_KEY])
        elif has_tools and not trace.tools and not is_own(trace.metadata) and _begins(trace.messages):
            found[trace.id] = WITHOUT_TOOLS
    return found


def _begins(messages: Sequence[Message]) -> bool:
    """Return whether nothing has been answered yet; false of a prompt of bare token ids, which does not show it."""
    return bool(messages) and not any(message.get("role") in ("assistant", "tool") for message in messages)


def asks_for_title(response_format: Any) -> bool:
    """Return whether the answer is to be an object with a title and nothing else."""
    described = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return isinstance(properties, Mapping) and set(properties) == {"title"}
