"""OpenAI's responses: requests to chat requests, with the conversation they continue.

`responses_output.py` has the way back. The conversation that a client leaves on the server is read from the store's
traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from rllm.gateway.dialects.base import (
    OpenAIDialect,
    check_single_chat,
    field,
    invalid,
    joined_parts,
    objects,
    wire_format,
)
from rllm.gateway.dialects.responses_output import (
    ENCRYPTED,
    ResponsesStreamEncoder,
    from_chat,
    output_items,
    wants_logprobs,
)
from rllm.gateway.dialects.responses_tools import CUSTOM_INPUT, Tools, given_again
from rllm.types import JSONMapping, JSONObject, Message, Trace, text_of

INSTRUCTIONS_KEY = "rllm.instructions"
"""Trace metadata: whether the first message is the request's `instructions`, which a continuation drops."""
TOOLS_KEY = "rllm.tools"
"""Trace metadata: the tools in namespaces, or that take plain text; see `Tools.unlike_functions`."""

_OURS = frozenset(
    # Translated below.
    "input instructions previous_response_id max_output_tokens text reasoning tools tool_choice include top_logprobs "
    # Answered or refused below.
    "background conversation multi_agent prompt prompt_cache_options store "
    # Meaningless for a chat completion.
    "access_programs client_metadata context_management image max_tool_calls metadata moderation prompt_cache_key "
    "prompt_cache_retention safety_identifier service_tier stream_options truncation user".split()
)
_REFUSED = {
    "background": "the answer is given to this very request",
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "send the prompt's text as input",
}
_REFUSED_IF_TRUE = {
    "multi_agent.enabled": "this server runs no agents of its own",
    "prompt_cache_options.prewarm": "every request is answered",
}
_NOT_CONVERSATION = frozenset({"additional_tools", "configuration_update", "compaction_trigger", "mcp_list_tools"})
"""Types of input items that are not part of the conversation."""
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_\d+)?")


class ResponsesDialect(OpenAIDialect):
    """OpenAI's `/v1/responses`."""

    wire = wire_format("responses")
    id_prefix = "resp_"
    needs = "'model' and 'input'"
    prompt_name = "input"
    chat_names: Mapping[str, str] = MappingProxyType(
        {
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
            "verbosity": "text.verbosity",
            "response_format[json_object]": "text.format[json_object]",
            "response_format[json_schema]": "text.format[json_schema]",
        }
    )
    continues_answers = True

    def refers_to(self, asked: JSONMapping) -> Sequence[str]:
        return refers_to(asked)

    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        return to_chat(asked, earlier)

    def trace_metadata(self, asked: JSONMapping) -> JSONMapping:
        unlike_functions = Tools(asked).unlike_functions()
        return {
            **({INSTRUCTIONS_KEY: True} if asked.get("instructions") else {}),
            **({TOOLS_KEY: unlike_functions} if unlike_functions else {}),
        }

    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        return orjson.dumps(from_chat(response, asked))

    def encoder(self, *, asked: JSONMapping) -> ResponsesStreamEncoder:
        return ResponsesStreamEncoder(asked)

    def render_count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": num_tokens})


def refers_to(asked: JSONMapping) -> list[str]:
    """Return the ids of the responses whose conversation or items a request continues."""
    previous = asked.get("previous_response_id")
    items = asked.get("input")
    references = items if isinstance(items, list) else ()
    found = [_response_of(item["id"]) for item in references if _is_reference(item)]
    return [*([previous] if isinstance(previous, str) else ()), *filter(None, found)]


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str)


def _response_of(item_id: str) -> str | None:
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
    chat = {name: value for name, value in asked.items() if name not in _OURS and value is not None}
    messages: list[Message] = []
    if asked.get("instructions"):
        messages.append({"role": "system", "content": field(asked, "instructions", str, "")})
    messages += _history(asked.get("previous_response_id"), earlier)
    tools = Tools(asked)
    messages += _InputReader(earlier, tools).messages(asked.get("input"))
    if not messages:
        raise invalid("'input' is missing or empty: send a text or a list of items", "input")
    chat["messages"] = messages
    if asked.get("max_output_tokens") is not None:
        chat["max_tokens"] = asked["max_output_tokens"]
    reasoning, text = _configuration(asked)
    logprobs = {"logprobs": True, **_present(asked, "top_logprobs")} if wants_logprobs(asked) else {}
    chat.update(tools.to_chat(asked.get("tool_choice")), **_text_fields(text), **logprobs)
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    check_single_chat(chat, "a response is one answer: call again, or use chat completions")
    return chat


def asked_of(trace: Trace) -> JSONObject:
    """Return the fields of a trace's request that its response repeats, as far as the trace has them."""
    asked: JSONObject = {**trace.sampling, **trace.requested_sampling}
    if trace.metadata.get(INSTRUCTIONS_KEY) and trace.messages:  # a redaction hook may have left none
        asked["instructions"] = trace.messages[0].get("content")
    functions = [tool.get("function") or {} for tool in trace.tools or ()]
    return {
        **_present(asked, "instructions", "temperature", "top_p", "parallel_tool_calls"),
        "max_output_tokens": asked.get("max_tokens"),
        "tools": given_again(functions, trace.metadata.get(TOOLS_KEY) or {}),
    }


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


class _InputReader:
    """Converter of input items to messages: reasoning, text and tool calls of one turn are one message."""

    def __init__(self, earlier: Mapping[str, Trace], tools: Tools) -> None:
        self._earlier = earlier
        self._tools = tools
        self._turn: Message = {}
        self._answer: str | None = None
        """Id of the response that the open turn is, as far as its items' ids name it."""
        self._done: list[Message] = []

    def messages(self, given: Any) -> list[Message]:
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        items = objects(given if given is not None else [], "input")
        for position, item in enumerate(items):
            self._read(item, f"input[{position}]")
        if items and items[-1].get("type") == "compaction_trigger":
            where = f"input[{len(items) - 1}]"
            raise invalid(f"{where}.type='compaction_trigger': this server does not compact: leave it out", where)
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
                content = _content(item.get("output") or "", f"{where}.output")
                self._add({"role": "tool", "tool_call_id": call_id, "content": content})
            case "item_reference":
                self._read(self._referenced(field(item, "id", str, where), where), where)
            case other if not (isinstance(other, str) and other in _NOT_CONVERSATION):
                raise invalid(f"{where}.type={other!r}: this item has no counterpart in a chat completion", where)

    def _message(self, item: JSONObject, where: str) -> None:
        role = field(item, "role", str, where)
        content = _content(item.get("content") or "", f"{where}.content")
        if role != "assistant":
            self._add({"role": role, "content": content})
            return
        if not content and self._turn:
            return  # Some clients split an empty item off.
        self._begin_unless(item, "reasoning_content")
        self._turn["content"] = content

    def _call(self, item: JSONObject, arguments: str, where: str) -> None:
        name = self._tools.chat_name(field(item, "name", str, where), field(item, "namespace", str, where, ""))
        function = {"name": name, "arguments": arguments}
        call = {"id": field(item, "call_id", str, where), "type": "function", "function": function}
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
    """Return the text of a reasoning item; clients keep one or another of its possible places."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and (text := text_of({"content": objects(parts, name)})):
            return text
    carried = item.get("encrypted_content")
    return carried.removeprefix(ENCRYPTED) if isinstance(carried, str) and carried.startswith(ENCRYPTED) else ""


def _content(value: Any, where: str) -> str | list[JSONObject]:
    if isinstance(value, str):
        return value
    return joined_parts([_part(part, f"{where}[{position}]") for position, part in enumerate(objects(value, where))])


def _part(part: JSONMapping, where: str) -> JSONObject:
    match part.get("type"):
        case "input_text" | "output_text" | "text" | "summary_text":
            return {"type": "text", "text": field(part, "text", str, where)}
        case "refusal":
            return {"type": "text", "text": field(part, "refusal", str, where)}
        case "input_image":
            image = {"url": field(part, "image_url", str, where)}
            return {"type": "image_url", "image_url": image | _present(part, "detail")}
        case "input_file":
            return {"type": "file", "file": _present(part, "file_id", "filename", "file_data", "file_url")}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
        case other:
            raise invalid(f"{where}.type={other!r}: this part has no counterpart in a chat completion", where)


def _configuration(asked: JSONMapping) -> tuple[JSONObject, JSONObject]:
    """Return `reasoning` and `text`, as changed by the input's last `configuration_update` items."""
    reasoning = {**field(asked, "reasoning", dict, "", {})}
    text = {**field(asked, "text", dict, "", {})}
    items = asked["input"] if isinstance(asked.get("input"), list) else ()
    for position, item in enumerate(items):
        if item.get("type") == "configuration_update":
            reasoning |= _present(field(item, "reasoning", dict, f"input[{position}]", {}), "effort")
            text |= _present(field(item, "text", dict, f"input[{position}]", {}), "format")
    return reasoning, text


def _text_fields(config: JSONMapping) -> JSONObject:
    """Return the chat fields of `text`: `response_format` and `verbosity`."""
    form = field(config, "format", dict, "text", {})
    chat = _present(config, "verbosity")
    match form.get("type", "text"):
        case "text":
            return chat
        case "json_object":
            return {**chat, "response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {
                **_present(form, "name", "description", "strict"),
                "schema": field(form, "schema", dict, "text.format"),
            }
            return {**chat, "response_format": {"type": "json_schema", "json_schema": schema}}
        case other:
            raise invalid(f"text.format.type={other!r}: use text, json_object or json_schema", "text.format")


def _present(value: JSONMapping, *names: str) -> JSONObject:
    return {name: value[name] for name in names if value.get(name) is not None}
