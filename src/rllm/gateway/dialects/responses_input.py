"""OpenAI's responses: translation of requests, with their items and tools, to chat requests.

`responses.py` translates answers back. A conversation that the client leaves to the server is read from the store's
traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rllm.gateway.dialects.base import (
    arguments_object,
    check_single_chat,
    content_of,
    field,
    invalid,
    objects,
    present,
    reasoning_of,
    tool_call,
)
from rllm.inference.parameters import Table
from rllm.types import JSONMapping, JSONObject, Message, Trace, text_of

INSTRUCTIONS_KEY = "rllm.instructions"
"""Metadata key of a trace: True if its first message is the request's `instructions`, which a continuation drops."""
ENCRYPTED = "rllm:"
"""Prefix of reasoning that clients carry as opaque text (it is not encrypted here)."""
CUSTOM_INPUT = "input"
"""Only argument of the function that stands for a custom tool, which takes plain text."""

RESPONSES = Table("""
input, instructions, previous_response_id, stream | honoured | translated |
model | =model | =model |
input[message], input[reasoning], input[function_call], input[function_call_output] | honoured | translated |
input[custom_tool_call], input[custom_tool_call_output], input[item_reference] | honoured | translated |
input[additional_tools] | honoured | translated |
input[mcp_list_tools], input[configuration_update] | no effect | no effect |
input[*] | refused | refused | belongs to a tool that a provider runs, or that is not a function
content[input_text], content[output_text], content[refusal], content[summary_text] | honoured | translated |
content[input_image] | =content[image_url] | passed on as image_url |
content[input_file] | =content[file] | passed on as file |
max_output_tokens | honoured | passed on as max_tokens |
temperature, top_p | honoured | = |
top_logprobs, include[message.output_text.logprobs] | named | named | traces have them
include | honoured | translated |
include[reasoning.encrypted_content] | honoured | translated | reasoning is returned in any case
include[*] | named | named | belongs to a tool that a provider runs, or to images
tools, tools[function], tools[namespace] | honoured | translated |
tools[custom] | honoured | translated | as a function with one string parameter
tools[local_shell], tools[computer], tools[computer_use_preview] | refused | refused | define it as a function
tools[apply_patch] | refused | refused | define it as a function
tools[shell] | refused | refused | define it as a function; one in a provider's container is named
tools[*] | named | named | a provider would run it; the model does not see it
tools[].strict | =tools[].strict | passed on |
tools[].format, tools[].allowed_callers, tools[].output_schema, tools[].async | named | named |
tools[].defer_loading | named | named | the model sees the tool at once
tool_choice, tool_choice[auto], tool_choice[none], tool_choice[allowed_tools] | honoured | translated |
tool_choice[required], tool_choice[function], tool_choice[custom] | =tool_choice[required] | translated |
tool_choice[*] | refused | refused | belongs to a tool that a provider runs, or that is not a function
parallel_tool_calls | =parallel_tool_calls | = |
max_tool_calls | no effect | no effect | bounds tools that a provider runs
text, text.format[text] | honoured | translated |
text.format[json_object] | =response_format[json_object] | passed on as response_format |
text.format, text.format[json_schema] | =response_format[json_schema] | passed on as response_format |
text.verbosity | =verbosity | passed on as verbosity |
reasoning | honoured | translated |
reasoning.effort | =reasoning_effort | passed on as reasoning_effort |
reasoning.summary, reasoning.generate_summary | named | named | reasoning is returned as it was sampled
reasoning.context, reasoning.mode | named | named |
stream_options, stream_options.include_obfuscation | no effect | no effect |
truncation, truncation[disabled] | honoured | honoured | a prompt that is too long is refused
truncation[auto], context_management, image, moderation, access_programs | named | named |
background, conversation, prompt | refused | refused | send the whole conversation, or `previous_response_id`, and wait
multi_agent | no effect | no effect | `multi_agent.enabled` is refused
prompt_cache_options | no effect | no effect | `prompt_cache_options.prewarm` is refused
metadata, user, safety_identifier, service_tier, client_metadata | no effect | no effect |
store | no effect | no effect | answers are stored in any case
prompt_cache_key, prompt_cache_retention | no effect | no effect | common prefixes are cached in any case
""")
_REFUSED = {
    "background": "this server answers each request directly",
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "send the prompt's text as input",
}
_REFUSED_IF_TRUE = {
    "multi_agent.enabled": "this server runs no agents of its own",
    "prompt_cache_options.prewarm": "every request is answered",
}
_RUN_BY_CLIENTS = ("apply_patch", "computer", "computer_use_preview", "local_shell", "shell")
"""Types of tools that clients run, and that are not functions; a shell may run in a server's container instead."""
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_\d+)?")


def refers_to(asked: JSONMapping) -> list[str]:
    """Return the ids of the responses whose conversation or items a request continues."""
    previous, given = asked.get("previous_response_id"), asked.get("input")
    items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    references = [item.get("id") for item in items if item.get("type") == "item_reference"]
    found = [_response_of(item_id) for item_id in references if isinstance(item_id, str)]
    return [*([previous] if isinstance(previous, str) else ()), *filter(None, found)]


def _response_of(item_id: str) -> str | None:
    """Return the id of the response that an item's id names."""
    known = _ITEM_ID.fullmatch(item_id)
    return f"resp_{known[1]}" if known else None


def to_chat(asked: JSONMapping, earlier: Mapping[str, Trace]) -> JSONObject:
    """Return the chat request of a request; members that are not of this dialect are passed on.

    Args:
        asked: the request.
        earlier: the traces of the responses that it refers to.

    Raises:
        GatewayError: 400, if it is malformed, or refers to something that does not exist.
    """
    for name, remedy in _REFUSED.items():
        if asked.get(name):
            raise invalid(f"{name}={repr(asked[name])[:80]} is not supported: {remedy}", name)
    for name, why in _REFUSED_IF_TRUE.items():
        outer, _, inner = name.partition(".")
        if field(asked, outer, dict, "", {}).get(inner):
            raise invalid(f"{name} is not supported: {why}; leave it out", name)
    chat = {name: value for name, value in asked.items() if name not in RESPONSES.own_fields and value is not None}
    messages: list[Message] = []
    if asked.get("instructions"):
        messages.append({"role": "system", "content": field(asked, "instructions", str, "")})
    messages += _history(asked.get("previous_response_id"), earlier)
    tools = Tools(asked)
    messages += _InputReader(earlier, tools).messages(asked.get("input"))
    if not messages:
        raise invalid("'input' is missing or empty: send a text or a list of items", "input")
    chat["messages"] = messages
    effort = field(asked, "reasoning", dict, "", {}).get("effort")
    renamed = {"max_tokens": asked.get("max_output_tokens"), "reasoning_effort": effort}
    chat |= present(renamed, *renamed)
    chat |= {**tools.to_chat(asked.get("tool_choice")), **_text_fields(field(asked, "text", dict, "", {}))}
    check_single_chat(chat, "a response is one answer: call again, or use chat completions")
    return chat


def _history(previous: Any, earlier: Mapping[str, Trace]) -> list[Message]:
    """Return the conversation up to and including an earlier answer, without the instructions given for it."""
    if previous is None:
        return []
    trace = earlier.get(previous) if isinstance(previous, str) else None
    if trace is None or not trace.response:
        raise invalid(
            f"Previous response with id '{previous}' not found: it is not an answer of this session.",
            "previous_response_id",
            code="previous_response_not_found",
        )
    return [*trace.messages[bool(trace.metadata.get(INSTRUCTIONS_KEY)) :], trace.response]


def _text_fields(config: JSONMapping) -> JSONObject:
    """Return the chat fields of `text`: `response_format` and `verbosity`."""
    form = field(config, "format", dict, "text", {})
    chat = present(config, "verbosity")
    match form.get("type", "text"):
        case "text":
            return chat
        case "json_object":
            return {**chat, "response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {
                **present(form, "name", "description", "strict"),
                "schema": field(form, "schema", dict, "text.format"),
            }
            return {**chat, "response_format": {"type": "json_schema", "json_schema": schema}}
        case other:
            raise invalid(f"text.format.type={other!r}: use text, json_object or json_schema", "text.format")


# --- input ------------------------------------------------------------------------------------------------------------


class _InputReader:
    """Converter of input items to messages: reasoning, text and tool calls of one turn are one message."""

    def __init__(self, earlier: Mapping[str, Trace], tools: Tools) -> None:
        self._earlier = earlier
        self._tools = tools
        self._turn: Message = {}
        self._answer: str | None = None
        """Id of the response that the open turn comes from, if the ids of its items name it."""
        self._done: list[Message] = []

    def messages(self, given: Any) -> list[Message]:
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        items = objects(given if given is not None else [], "input")
        for position, item in enumerate(items):
            self._read(item, f"input[{position}]")
        self._end_turn()
        return self._done

    def _read(self, item: JSONObject, where: str) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._message(item, where)
            case "reasoning":
                # Some servers send the reasoning after the text.
                self._begin_unless(item, "content", "reasoning_content")
                self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + _thought(item)
            case "function_call":
                self._call(item, field(item, "arguments", str, where), where)
            case "custom_tool_call":
                self._call(item, json.dumps({CUSTOM_INPUT: item.get("input")}, ensure_ascii=False), where)
            case "function_call_output" | "custom_tool_call_output":
                call_id = field(item, "call_id", str, where)
                content = content_of(item.get("output") or "", f"{where}.output", _part)
                self._add({"role": "tool", "tool_call_id": call_id, "content": content})
            case "item_reference":
                self._read(self._referenced(field(item, "id", str, where), where), where)
            case "additional_tools" | "configuration_update" | "mcp_list_tools":
                pass  # `Tools` reads additional tools.
            case other:
                raise invalid(f"{where}.type={other!r}: this item has no counterpart in a chat completion", where)

    def _message(self, item: JSONObject, where: str) -> None:
        role = field(item, "role", str, where)
        content = content_of(item.get("content") or "", f"{where}.content", _part)
        if role != "assistant":
            self._add({"role": role, "content": content})
            return
        if not content and self._turn:
            return  # Some clients add an empty item.
        self._begin_unless(item, "reasoning_content")
        self._turn["content"] = content

    def _call(self, item: JSONObject, arguments: str, where: str) -> None:
        name = self._tools.chat_name(field(item, "name", str, where), field(item, "namespace", str, where, ""))
        call = tool_call(field(item, "call_id", str, where), name, arguments)
        self._turn.setdefault("tool_calls", []).append(call)

    def _referenced(self, item_id: str, where: str) -> JSONObject:
        trace = self._earlier.get(_response_of(item_id) or "")
        items = output_items(trace.response, trace.id) if trace is not None else ()
        found = next((item for item in items if item["id"] == item_id), None)
        if found is None:
            raise invalid(f"Item with id '{item_id}' not found: it is not an item of this session.", where)
        return found

    def _begin_unless(self, item: JSONMapping, *may_precede: str) -> None:
        """Begin a new turn, unless this item belongs to the open one, which may have only these fields already."""
        answer = _response_of(str(item.get("id")))
        of_another = answer is not None and self._answer is not None and answer != self._answer
        if of_another or len(self._turn) > 1 or not self._turn.keys() <= set(may_precede):
            self._end_turn()
        self._answer = answer or self._answer

    def _add(self, message: Message) -> None:
        self._end_turn()
        self._done.append(message)

    def _end_turn(self) -> None:
        if self._turn:
            empty = None if self._turn.get("tool_calls") else ""
            self._done.append({"role": "assistant", "content": empty, **self._turn})
            self._turn, self._answer = {}, None


def _thought(item: JSONMapping) -> str:
    """Return the text of a reasoning item, from whichever of its fields the client has kept."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and (text := text_of({"content": objects(parts, name)})):
            return text
    carried = item.get("encrypted_content")
    return carried.removeprefix(ENCRYPTED) if isinstance(carried, str) and carried.startswith(ENCRYPTED) else ""


def _part(part: JSONMapping, where: str) -> JSONObject:
    match part.get("type"):
        case "input_text" | "output_text" | "text" | "summary_text":
            return {"type": "text", "text": field(part, "text", str, where)}
        case "refusal":
            return {"type": "text", "text": field(part, "refusal", str, where)}
        case "input_image":
            image = {"url": field(part, "image_url", str, where)}
            return {"type": "image_url", "image_url": image | present(part, "detail")}
        case "input_file":
            return {"type": "file", "file": present(part, "file_id", "filename", "file_data", "file_url")}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
        case other:
            raise invalid(f"{where}.type={other!r}: this part has no counterpart in a chat completion", where)


# --- items of answers -------------------------------------------------------------------------------------------------


def output_items(message: Message, response_id: str, asked: JSONMapping | None = None) -> list[JSONObject]:
    """Return the items of an assistant's message: reasoning, text, tool calls. Their ids name the response."""
    tools = Tools(asked or {})
    own = response_id.removeprefix("resp_")
    items: list[JSONObject] = []
    if thought := reasoning_of(message):
        items.append(reasoning_item(own, thought))
    calls = message.get("tool_calls") or ()
    parts = [text_part(text)] if (text := text_of(message)) else []
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    if parts or not calls:
        items.append(message_item(own, parts or [text_part("")]))
    return items + [_call_item(own, position, call, tools) for position, call in enumerate(calls)]


def reasoning_item(own: str, thought: str) -> JSONObject:
    """Return an item that has the reasoning twice, because some clients send back only the opaque text."""
    return {
        "id": f"rs_{own}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thought}],
        "encrypted_content": f"{ENCRYPTED}{thought}",
    }


def message_item(own: str, parts: list[JSONObject]) -> JSONObject:
    """Return a message item; `own` is the response's id without its prefix."""
    return {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": "completed", "content": parts}


def text_part(text: str) -> JSONObject:
    """Return a part of a message, without log-probabilities."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(own: str, position: int, call: JSONMapping, tools: Tools) -> JSONObject:
    function = call.get("function") or {}
    tool, arguments = tools.called(function.get("name") or ""), function.get("arguments") or ""
    item = {"id": f"fc_{own}_{position}", "call_id": call.get("id"), "name": tool.name, "status": "completed"}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if not tool.is_custom:
        return {**item, "type": "function_call", "arguments": arguments}
    given = arguments_object(arguments).get(CUSTOM_INPUT)
    # Arguments of another form are passed on as they were sampled.
    return {**item, "type": "custom_tool_call", "input": given if isinstance(given, str) else arguments}


# --- tools ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function, or a custom tool."""

    name: str
    namespace: str
    """Namespace of the tool; empty outside of any."""
    is_custom: bool
    function: JSONMapping
    """Members of the chat's function besides its name."""

    @property
    def chat_name(self) -> str:
        """Its name in a chat, which knows no namespaces."""
        return re.sub(r"[^a-zA-Z0-9_-]", "_", f"{self.namespace}__{self.name}")[:64] if self.namespace else self.name


class Tools:
    """Tools of a request as functions of a chat, which knows neither namespaces nor custom tools."""

    def __init__(self, asked: JSONMapping) -> None:
        given = list(objects(asked.get("tools") or [], "tools"))
        items = asked["input"] if isinstance(asked.get("input"), list) else ()
        for position, item in enumerate(items):
            if isinstance(item, dict) and item.get("type") == "additional_tools":
                given += objects(item.get("tools"), f"input[{position}].tools")
        self._any_given = bool(given)
        self._tools = {tool.chat_name: tool for each in given for tool in _flattened(each)}

    def chat_name(self, name: str, namespace: str) -> str:
        """Return a tool's name in the chat; if the request does not have the tool, its own name."""
        found = (tool for tool in self._tools.values() if (tool.name, tool.namespace) == (name, namespace))
        return next((tool.chat_name for tool in found), name)

    def called(self, chat_name: str) -> Tool:
        """Return the tool with this name in the chat; an unknown one is treated as a function."""
        unknown = Tool(name=chat_name, namespace="", is_custom=False, function={})
        return self._tools.get(chat_name, unknown)

    def to_chat(self, choice: Any) -> JSONObject:
        """Return `tools` and `tool_choice` of a chat; if only some tools are allowed, the model is shown only these."""
        tools = list(self._tools.values())
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "allowed_tools":
                allowed = objects(choice.get("tools"), "tool_choice.tools")
                tools = [tool for tool in tools if any(_is_named(tool, named) for named in allowed)]
                unknown = [named.get("name") for named in allowed if named.get("type") in _SHOWN]
                if unknown and not tools:
                    names = ", ".join(repr(name)[:80] for name in unknown[:8])
                    raise invalid(f"tool_choice.tools: {names} are not in 'tools': name some of them", "tool_choice")
                choice = choice.get("mode") or "auto"
            elif kind in ("function", "custom"):
                name = field(choice, "name", str, "tool_choice")
                found = sorted((tool for tool in tools if _is_named(tool, choice)), key=lambda tool: tool.namespace)
                chosen = found[0].chat_name if found else name
                choice = {"type": "function", "function": {"name": chosen}}
            else:
                raise invalid(f"tool_choice.type={kind!r}: use function, custom or allowed_tools", "tool_choice")
        if not tools:
            return {} if self._any_given or choice in (None, "auto", "none") else {"tool_choice": choice}
        shown = [{"type": "function", "function": {"name": tool.chat_name, **tool.function}} for tool in tools]
        return {"tools": shown} | ({"tool_choice": choice} if choice is not None else {})


_SHOWN = frozenset({"function", "custom", "namespace"})
"""Types of tools that the model sees."""


def _flattened(tool: JSONMapping, namespace: str = "") -> Iterable[Tool]:
    """Yield the tools that one tool stands for: none if OpenAI's servers run it, several for a namespace.

    Raises:
        GatewayError: 400, if it is malformed, or if its client would run it and wait for calls that never come.
    """
    kind, environment = tool.get("type"), tool.get("environment")
    if kind in _SHOWN:
        name = field(tool, "name", str, "tools[]")
    match kind:
        case "function":
            function = present(tool, "description", "strict")
            function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
            yield Tool(name=name, namespace=namespace, is_custom=False, function=function)
        case "custom":
            text = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
            function = {**present(tool, "description"), "parameters": text}
            yield Tool(name=name, namespace=namespace, is_custom=True, function=function)
        case "namespace":
            for inner in objects(tool.get("tools"), "tools[].tools"):
                yield from _flattened(inner, name)
        case _ if kind in _RUN_BY_CLIENTS:
            if not (isinstance(environment, dict) and str(environment.get("type")).startswith("container")):
                raise invalid(f"tools[].type={kind!r}: a chat completion has no such calls: give a function", "tools")


def _is_named(tool: Tool, named: JSONMapping) -> bool:
    """Return whether a choice names a tool, or the namespace that it is in."""
    namespace = named.get("namespace") or tool.namespace
    return namespace == tool.namespace and named.get("name") in (tool.name, tool.namespace)
