"""Calls that an agent's program makes beside its task, such as asking for a title, told from those of the task.

That is guessed of programs that nobody here wrote, also if the author's code has started them. What this code itself calls, in
this process or in one that knows its session, is of the task, with tools or without: a tool may well ask the model something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.types import SIDE_CALL_KEY, Message, Trace, text_of

OWN_KEY = "session_uids"
"""In the metadata of calls whose client names its session by itself."""
PROGRAM_KEY = "of_program"
"""In the metadata of calls of a program that was started in a session, which its clients were told to send along."""
TITLE = "title"
"""The answer was to be a title and nothing else."""
WITHOUT_TOOLS = "without tools"
"""The session's other calls have tools; this one has none, begins a conversation of its own, and nothing goes on from it."""


def side_call(request: Mapping[str, Any], *, session_has_tools: bool, is_own: bool = False) -> str | None:
    """Why a chat request is a side call, as far as that can be known before the calls that follow it.

    `is_own`: the author's code made it, through a client that names its session by itself.
    """
    if is_own:
        return None
    if "response_format" in request and _asks_for_title(request["response_format"]):
        return TITLE
    if session_has_tools and not request.get("tools") and _begins(request["messages"]):
        return WITHOUT_TOOLS
    return None


def is_own(metadata: Mapping[str, Any]) -> bool:
    """Whether the author's own code made a call with this metadata."""
    return OWN_KEY in metadata and PROGRAM_KEY not in metadata


def side_calls(traces: Sequence[Trace]) -> set[str]:
    """The ids of a session's side calls, of which nothing is known where all calls are alike: then there are none."""
    tagged = {trace.id for trace in traces if SIDE_CALL_KEY in trace.metadata}
    if any(trace.tools for trace in traces):
        foreign = (trace for trace in traces if not is_own(trace.metadata))
        tagged |= {trace.id for trace in foreign if not trace.tools and _begins(trace.messages)}
    if tagged:
        told, parents = _answers_in(traces), {trace.parent_id for trace in traces}
        gone_on_from = (t for t in traces if t.id in parents or _text_of(t.response) in told)
        tagged -= {trace.id for trace in gone_on_from if trace.metadata.get(SIDE_CALL_KEY) != TITLE}
    return tagged if len(tagged) < len(traces) else set()


def _begins(messages: Sequence[Message]) -> bool:
    """Whether nothing has been answered yet; of a prompt of bare token ids nobody can tell."""
    return bool(messages) and not any(message.get("role") in ("assistant", "tool") for message in messages)


def _answers_in(traces: Sequence[Trace]) -> set[str]:
    """The texts that conversations go on from, such as a plan that was made before the tools were given. Calls of tools have
    none, and are no sign of an answer that has none either."""
    answers = (message for trace in traces for message in trace.messages if message.get("role") == "assistant")
    return {text for answer in answers if (text := _text_of(answer))}


def _text_of(answer: Message) -> str:
    """What an answer says, without the white space around it, which programs may leave out."""
    return text_of(answer).strip()


def _asks_for_title(response_format: Any) -> bool:
    """Whether the answer is to be an object with a title and nothing else."""
    described = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return isinstance(properties, Mapping) and set(properties) == {"title"}
