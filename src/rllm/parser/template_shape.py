"""Form of messages that a chat template reads, found by rendering probes.

Templates disagree about content (text or parts), arguments (string or object) and much else, and most print nothing of
a form that they do not know. A probe is a short conversation whose texts are markers: a form is right if its markers
are printed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from rllm.types import JSONMapping, JSONObject, Message, text_of

Tools: TypeAlias = Sequence[JSONMapping]
Render: TypeAlias = Callable[[Sequence[Message], Tools | None], str]
"""The template: messages and tools in its own form to text. Raises what the template raises."""

USER, ANSWERS = "user messages", "answers"
SYSTEM, LATER_SYSTEM = "system messages", "system messages after the first turn"
TOOLS, CALLS, RESULTS = "tools", "tool calls", "tool results"
BESIDE_CALLS, FURTHER_CALLS = "text alongside tool calls", "further tool calls of an answer"
SERIOUS = frozenset({TOOLS, CALLS, FURTHER_CALLS})
"""Kinds without which a conversation means something else, other than messages, which are refused when rendered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateShape:
    """Form in which a template prints as much as it can of a conversation in the OpenAI format."""

    parts: frozenset[str] = frozenset()
    """Roles whose content is a list of parts."""
    argument_strings: bool = True
    """Arguments of tool calls stay the string that the model wrote. Else they are an object, where that is JSON."""
    no_content: Literal["", "null", "absent"] = ""
    """Content of an answer that has tool calls only."""
    only_calls: bool = False
    """An answer with tool calls has no text, because the template would print the text and no call."""
    bare_tools: bool = False
    """Tools are without the `{"type": "function", "function": ...}` around them."""
    result_role: str = "tool"
    names_results: bool = False
    """A tool's result has the tool's name, which OpenAI's clients leave out."""
    short_ids: bool = False
    """Ids of calls have nine letters or digits, as Mistral's templates insist."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Kinds of content that are printed in no form, with the template's error; "" if it drops them without one."""

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in this form; their content is text."""
        names: dict[str, str] = {}
        shaped = []
        for message in map(_with_short_ids, messages) if self.short_ids else messages:
            calls = message.get("tool_calls") or ()
            names |= {call["id"]: call["function"]["name"] for call in calls if _is_named(call)}
            shaped.append(self._message(message, names))
        return shaped

    def tools(self, tools: Tools | None) -> list[JSONObject] | None:
        """Return the tools in this form, or None if there are none."""
        if not tools:
            return None
        wrapped = map(_wrapped, tools)
        return [dict(tool["function"] if self.bare_tools and "function" in tool else tool) for tool in wrapped]

    def lost_of(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, ...]:
        """Return the kinds of content of a request that its prompt lacks, where the template raises no error for it."""
        silent = [kind for kind, error in self.lost.items() if not error]
        read = [message for message in messages if isinstance(message, Mapping)] if silent else []
        return tuple(kind for kind in silent if _CARRIES[kind](read, tools))

    def _message(self, message: Message, names: Mapping[str, str]) -> Message:
        role, content = message["role"], message["content"]
        shaped = dict(message)
        if calls := message.get("tool_calls"):
            shaped["tool_calls"] = [self._call(call) for call in calls]
            if not content or self.only_calls:
                content = None if self.no_content else ""
        shaped["content"] = (
            [{"type": "text", "text": content}] if role in self.parts and content is not None else content
        )
        if content is None and self.no_content == "absent":
            del shaped["content"]
        if role == "tool":
            shaped["role"] = self.result_role
            if self.names_results and not message.get("name") and (name := names.get(str(message.get("tool_call_id")))):
                shaped["name"] = name
        return shaped

    def _call(self, call: object) -> object:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str) and not self.argument_strings:
            arguments = _parsed_object(arguments)
        elif isinstance(arguments, Mapping) and self.argument_strings:
            arguments = json.dumps(arguments, ensure_ascii=False, default=str)
        else:
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_short_ids(message: Message) -> Message:
    """Return the message with ids of calls that templates of any kind take."""
    shortened = dict(message)
    if isinstance(called := message.get("tool_call_id"), str):
        shortened["tool_call_id"] = _short_id(called)
    if calls := message.get("tool_calls"):
        shortened["tool_calls"] = [
            {**call, "id": _short_id(call["id"])}
            if isinstance(call, Mapping) and isinstance(call.get("id"), str)
            else call
            for call in calls
        ]
    return shortened


def _short_id(call_id: str) -> str:
    """Return the id itself if it has nine letters or digits, else nine digits that follow from it."""
    if len(call_id) == _SHORT and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT]


def _wrapped(tool: JSONMapping) -> JSONMapping:
    """Return a tool in the format of chat completions; data sets often have functions alone."""
    if not isinstance(tool, Mapping) or "function" in tool or not {"name", "parameters"} <= tool.keys():
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _is_named(call: object) -> bool:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return False
    return isinstance(function.get("name"), str) and isinstance(call.get("id"), str)


def arguments_of(message: Message) -> list[object]:
    """Return the arguments of an answer's tool calls: objects, and what is not a JSON object as it is."""
    functions = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    found = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return [_parsed_object(arguments) if isinstance(arguments, str) else arguments for arguments in found]


def _parsed_object(arguments: str) -> object:
    """Return the arguments as a dict, or unchanged if they are not a JSON object, or nested too deep to be read.

    Clients write a call without arguments as an empty string, too.
    """
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _has_role(*roles: str) -> Callable[[Sequence[Message], Tools | None], bool]:
    return lambda messages, tools: any(message.get("role") in roles for message in messages)


def _has_later_system(messages: Sequence[Message], tools: Tools | None) -> bool:
    roles = ["system" if message.get("role") == "developer" else message.get("role") for message in messages]
    return any(role == "system" != before for before, role in pairwise(roles))


_CARRIES: dict[str, Callable[[Sequence[Message], Tools | None], bool]] = {
    USER: _has_role("user"),
    ANSWERS: _has_role("assistant"),
    SYSTEM: _has_role("system", "developer"),
    LATER_SYSTEM: _has_later_system,
    TOOLS: lambda messages, tools: bool(tools),
    CALLS: lambda messages, tools: any(message.get("tool_calls") for message in messages),
    FURTHER_CALLS: lambda messages, tools: any(len(message.get("tool_calls") or ()) > 1 for message in messages),
    BESIDE_CALLS: lambda messages, tools: any(
        message.get("tool_calls") and text_of(message).strip() for message in messages
    ),
    RESULTS: _has_role("tool"),
}
"""Tests of requests for each kind of content."""

_TEXT, _MORE, _NAME, _ABOUT = "rllmtext6c1f", "rllmmore93d2", "rllm_name_0b7e", "rllmabout4e1a"
_KEY, _VALUE = "rllm_key_7d20", "rllmvalue5f3c"
_SHORT = 9
_CALL_ID, _SECOND_ID = "rllm6c1f0", "rllm2e95a"
_LONG_ID = "call_" + "6c1f0" * 6
_ARGUMENTS = f'{{"{_KEY}":  "{_VALUE}"}}'  # spaced as no serializer does
_CALL_MARKS = (_NAME, _KEY, _VALUE)
_ASK: Message = {"role": "user", "content": "rllmask2a9b"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
_RESULT: Message = {"role": "tool", "tool_call_id": _CALL_ID, "content": _TEXT}
_PROPERTIES = {_KEY: {"type": "string", "description": "A text."}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": _ABOUT,
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": [_KEY]},
    },
}


def probed(render: Render) -> TemplateShape:
    """Return the form in which this template prints most, from some ten renderings."""
    shape = _with_content(render, TemplateShape())
    forms = [{"bare_tools": False}, {"bare_tools": True}]
    shape = _first(render, shape, TOOLS, forms, [_ASK], (_NAME, _ABOUT, _KEY), tools=[_TOOL])
    shape = _with_results(render, _with_calls(render, shape))
    return replace(shape, short_ids=CALLS not in shape.lost and _refuses_long_ids(render, shape))


def _refuses_long_ids(render: Render, shape: TemplateShape) -> bool:
    """Return whether a call is refused for the length of its id."""
    tools = None if TOOLS in shape.lost else [_TOOL]
    calls = [{**_CALL["tool_calls"][0], "id": _LONG_ID}]
    chat = [_ASK, {**_CALL, "tool_calls": calls}, {**_RESULT, "tool_call_id": _LONG_ID}]
    return _VALUE not in _text(render, shape, chat, tools) and _VALUE in _text(
        render, shape, [_ASK, _CALL, _RESULT], tools
    )


def _with_content(render: Render, shape: TemplateShape) -> TemplateShape:
    """Find how the content of each role is read."""
    chats: dict[str, list[Message]] = {
        USER: [{"role": "user", "content": _TEXT}],
        SYSTEM: [{"role": "system", "content": _TEXT}, _ASK],
        ANSWERS: [_ASK, {"role": "assistant", "content": _TEXT}, _ASK],
    }
    for kind, chat in chats.items():
        role = next(message["role"] for message in chat if message["content"] == _TEXT)
        forms = [{"parts": shape.parts}, {"parts": shape.parts | {role}}]
        shape = _first(render, shape, kind, forms, chat, (_TEXT,))
    if SYSTEM in shape.lost:
        return shape
    begin: list[Message] = [{"role": "system", "content": _MORE}, _ASK, {"role": "assistant", "content": _MORE}]
    return _first(render, shape, LATER_SYSTEM, [{}], [*begin, {"role": "system", "content": _TEXT}, _ASK], (_TEXT,))


def _with_calls(render: Render, shape: TemplateShape) -> TemplateShape:
    """Find how tool calls are read."""
    tools = None if TOOLS in shape.lost else [_TOOL]
    for chat in ([_ASK, _CALL], [_ASK, _CALL, _RESULT]):
        for no_content in ("", "null", "absent"):
            tried = replace(shape, no_content=no_content)
            as_string, as_object = (
                _text(render, replace(tried, argument_strings=strings), chat, tools) for strings in (True, False)
            )
            strings = _prefers_strings(as_string, as_object)
            if strings is not None:
                shape = _with_text_beside(render, replace(tried, argument_strings=strings), chat, tools)
                return _with_further_calls(render, shape, chat[2:], tools)
    return _first(render, replace(shape, argument_strings=False), CALLS, [{}], [_ASK, _CALL], _CALL_MARKS, tools)


def _prefers_strings(as_string: str, as_object: str) -> bool | None:
    """Return whether arguments are best given as a string, by what is printed of either form; None if neither survives.

    Many templates print a string as it is, and an object in another form than JSON, such as Qwen3-Coder's tags. For
    these the object is right, since the model writes that form.
    """
    object_survives = all(mark in as_object for mark in _CALL_MARKS)
    is_verbatim = _NAME in as_string and _ARGUMENTS in as_string
    if is_verbatim and (not object_survives or _squeezed(as_string) == _squeezed(as_object)):
        return True
    if object_survives:
        return False
    return True if all(mark in as_string for mark in _CALL_MARKS) else None  # quoted once more


def _with_text_beside(
    render: Render, shape: TemplateShape, chat: Sequence[Message], tools: Tools | None
) -> TemplateShape:
    """Find out if an answer's text survives with its calls, and if not, if the calls survive with the text."""
    chat = [message if message is not _CALL else {**_CALL, "content": _MORE} for message in chat]
    found = _first(render, shape, BESIDE_CALLS, [{}], chat, (_MORE, _NAME, _VALUE), tools)
    calls_survive = BESIDE_CALLS not in found.lost or _VALUE in _text(render, shape, chat, tools)
    return found if calls_survive else replace(found, only_calls=True)


def _with_further_calls(
    render: Render, shape: TemplateShape, results: Sequence[Message], tools: Tools | None
) -> TemplateShape:
    """Find out if all calls of an answer are printed: gpt-oss's template prints one only, Llama 3.1's refuses two."""
    function = {"name": _NAME, "arguments": _ARGUMENTS.replace(_VALUE, _MORE)}
    second = {"id": _SECOND_ID, "type": "function", "function": function}
    calls = {**_CALL, "tool_calls": [*_CALL["tool_calls"], second]}
    second_results = [{**result, "tool_call_id": _SECOND_ID} for result in results]
    chat = [_ASK, calls, *results, *second_results]
    return _first(render, shape, FURTHER_CALLS, [{}], chat, (_VALUE, _MORE), tools)


def _with_results(render: Render, shape: TemplateShape) -> TemplateShape:
    """Find how the results of tools are read."""
    tools = None if TOOLS in shape.lost else [_TOOL]
    chat = [_ASK, _CALL, _RESULT]
    forms = [
        {"result_role": role, "names_results": named, "parts": parts}
        for role in ("tool", "ipython", "function")
        for named in (False, True)
        for parts in (shape.parts, shape.parts | {"tool"})
    ]
    shape = _first(render, shape, RESULTS, forms, chat, (_TEXT,), tools)
    if RESULTS not in shape.lost and _MORE in _text(render, shape, [*chat[:2], {**_RESULT, "name": _MORE}], tools):
        return replace(shape, names_results=True)
    return shape


def _first(
    render: Render,
    shape: TemplateShape,
    kind: str,
    forms: Iterable[JSONMapping],
    chat: Sequence[Message],
    marks: Sequence[str],
    tools: Tools | None = None,
) -> TemplateShape:
    """Return the shape with the first of the forms in which all marks are printed, else with this kind as lost."""
    why: str | None = None
    for form in forms:
        tried = replace(shape, **form)
        try:
            text = render(tried.messages(chat), tried.tools(tools))
        except Exception as error:  # a template is a program of its author: it may raise anything
            text = ""
            found = f"{type(error).__name__}: {error}"
        else:
            found = ""
        if all(mark in text for mark in marks):
            return tried
        why = found if why is None else why
    return replace(shape, lost={**shape.lost, kind: why or ""})


def _text(render: Render, shape: TemplateShape, chat: Sequence[Message], tools: Tools | None) -> str:
    """Return the rendered chat, or "" if the template refuses it."""
    try:
        return render(shape.messages(chat), shape.tools(tools))
    except Exception:
        return ""


def _squeezed(text: str) -> str:
    """Return the text without spaces and with one kind of quotes: an object that is printed raw is Python's."""
    return "".join(text.split()).replace("'", '"')
