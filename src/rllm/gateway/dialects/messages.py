"""Anthropic's messages: requests to chat requests, chat answers to messages, chunks to Anthropic's events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from rllm.capture import ChatStream
from rllm.gateway.dialects.base import WholeConversations, event, first_choice, reasoning_of, token_fields, usage_of
from rllm.gateway.dialects.fields import check_single_chat, field, invalid, note_left_out, objects, parse_object
from rllm.gateway.errors import CONTEXT_OVERFLOW, GatewayError
from rllm.types import Message, Trace, text_of

RAW_ARGUMENTS = "INVALID_JSON"
"""The only member of a tool's input whose sampled arguments are no JSON object: Anthropic's format has objects only."""

_OURS = frozenset(
    # Translated below.
    "messages system stop_sequences tools tool_choice output_config output_format thread "
    # Without a meaning for a chat completion, or for any model but Anthropic's own.
    "cache_control container context_management diagnostics inference_geo mcp_servers metadata service_tier speed "
    "thinking user_profile_id workspace_id betas fallbacks".split()
)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesDialect(WholeConversations):
    """Anthropic's `/v1/messages`."""

    id_prefix = "msg_"

    def parse(self, body: bytes) -> dict[str, Any]:
        return parse_object(body, needs="'model' and 'messages'")

    def to_chat(self, asked: dict[str, Any], earlier: Mapping[str, Trace]) -> dict[str, Any]:
        return to_chat(asked)

    def render(self, response: dict[str, Any], *, asked: Mapping[str, Any]) -> bytes:
        return orjson.dumps(from_chat(response, asked))

    def encoder(self, *, asked: Mapping[str, Any]) -> MessagesStreamEncoder:
        return MessagesStreamEncoder(asked)

    def render_error(self, error: GatewayError) -> bytes:
        return orjson.dumps(error_to_dict(error))


def render_count(num_tokens: int) -> bytes:
    """The answer of `/v1/messages/count_tokens`."""
    return orjson.dumps({"input_tokens": num_tokens})


def error_to_dict(error: GatewayError) -> dict[str, Any]:
    """An error in Anthropic's form. Clients know a prompt that is too long by how its message begins."""
    message = f"prompt is too long: {error}" if error.code == CONTEXT_OVERFLOW else str(error)
    default = "invalid_request_error" if error.status < 500 else "api_error"
    shown = {"type": _ERROR_TYPES.get(error.status, default), "message": message}
    return {"type": "error", "error": {**shown, "details": error.details} if error.details else shown}


# --- requests ---------------------------------------------------------------------------------------------------------


def to_chat(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request of a message request; members that are not Anthropic's are passed on.

    Raises:
        GatewayError: 400, if it is malformed, or asks for what only a server that keeps conversations can give.
    """
    if asked.get("thread") is not None:
        raise _thread_refused()
    chat = {name: value for name, value in asked.items() if name not in _OURS and value is not None}
    messages: list[Message] = []
    if asked.get("system"):
        messages.append({"role": "system", "content": _content(asked["system"], "system")})
    for position, message in enumerate(objects(asked.get("messages"), "messages")):
        messages += _messages_of(message, f"messages[{position}]")
    if messages and messages[-1]["role"] == "assistant":
        raise invalid(
            "the last message is the assistant's, and the beginning of an answer cannot be given: end with a user message",
            "messages",
        )
    chat["messages"] = messages
    if asked.get("stop_sequences"):
        chat["stop"] = asked["stop_sequences"]
    choice = _tool_choice(asked)
    if tools := [found for tool in objects(asked.get("tools") or [], "tools") if (found := _tool(tool))]:
        chat |= {"tools": tools, **choice}
    chat |= _output(asked)
    check_single_chat(chat, "a message is one answer: call again, or use chat completions")
    return chat


def _messages_of(message: Mapping[str, Any], where: str) -> list[Message]:
    """The chat messages of one message: a tool's results are messages of their own there."""
    role = field(message, "role", str, where)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, where)]
    found: list[Message] = []
    run: list[dict[str, Any]] = []
    for position, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            if run:
                found.append({"role": role, "content": _content(run, where)})
                run = []
            found.append(_tool_result(block, f"{where}.content[{position}]"))
        else:
            run.append(block)
    if run or not blocks:
        found.append({"role": role, "content": _content(run, f"{where}.content")})
    return found


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts = [block for block in blocks if block.get("type") == "text"]
    message: Message = {"role": "assistant", "content": _content(texts, f"{where}.content") or None}
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for position, block in enumerate(blocks):
        place = f"{where}.content[{position}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(field(block, "thinking", str, place))
            case "tool_use":
                calls.append(_tool_call(block, place))
            case "text" | "redacted_thinking":
                pass
            case other:
                raise invalid(f"{place}.type={other!r}: an assistant's message has text, thinking or tool_use", place)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message


def _tool_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = field(block, "input", dict, where, {})
    raw = given.get(RAW_ARGUMENTS) if given.keys() == {RAW_ARGUMENTS} else None
    arguments = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": field(block, "name", str, where), "arguments": arguments}
    return {"id": field(block, "id", str, where), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    content = _content(block.get("content") or "", f"{where}.content")
    return {"role": "tool", "tool_call_id": field(block, "tool_use_id", str, where), "content": content}


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """Blocks as a chat message's content: one text as a string, anything else as parts."""
    if isinstance(value, str):
        return value
    parts = [_part(block, f"{where}[{position}]") for position, block in enumerate(objects(value, where))]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": field(block, "text", str, where)}
        case "image":
            return {"type": "image_url", "image_url": {"url": _url(field(block, "source", dict, where), where)}}
        case "document":
            return _document(block, where)
        case "search_result":
            title, source = block.get("title") or "", block.get("source") or ""
            found = _content(block.get("content") or "", f"{where}.content")
            texts = found if isinstance(found, str) else "\n".join(part.get("text", "") for part in found)
            return {"type": "text", "text": f"{title}\n{source}\n{texts}".strip()}
        case "tool_reference":
            return {"type": "text", "text": f"The tool {field(block, 'tool_name', str, where)} can be called now."}
        case other:
            raise invalid(f"{where}.type={other!r}: this block has no counterpart in a chat completion", where)


def _document(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    source = field(block, "source", dict, where)
    title = block.get("title")
    if source.get("type") == "text":
        text = field(source, "data", str, f"{where}.source")
        return {"type": "text", "text": f"{title}\n{text}" if title else text}
    return {"type": "file", "file": {"filename": title or "document", "file_data": _url(source, where)}}


def _url(source: Mapping[str, Any], where: str) -> str:
    match source.get("type"):
        case "base64":
            media_type = field(source, "media_type", str, f"{where}.source")
            return f"data:{media_type};base64,{field(source, 'data', str, f'{where}.source')}"
        case "url":
            return field(source, "url", str, f"{where}.source")
        case other:
            raise invalid(f"{where}.source.type={other!r}: send base64 or url", f"{where}.source")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A function tool; `None` for one that Anthropic's servers run, or whose description only they know."""
    if tool.get("type") not in (None, "custom"):
        note_left_out(str(tool["type"]))
        return None
    function = {"name": field(tool, "name", str, "tools[]")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {"type": "object"}}}


def _tool_choice(asked: Mapping[str, Any]) -> dict[str, Any]:
    choice = asked.get("tool_choice")
    if choice is None:
        return {}
    if not isinstance(choice, dict) or choice.get("type") not in (*_TOOL_CHOICES, "tool"):
        raise invalid(f"tool_choice={repr(choice)[:80]}: its type is auto, any, tool or none", "tool_choice")
    chosen: Any = _TOOL_CHOICES.get(choice["type"])
    if chosen is None:
        chosen = {"type": "function", "function": {"name": field(choice, "name", str, "tool_choice")}}
    one_call = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **one_call}


def _output(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is said about the answer's form and about the effort that it is worth."""
    config = field(asked, "output_config", dict, "", {})
    chat: dict[str, Any] = {}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    form = config.get("format") or asked.get("output_format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise invalid(f"output_config.format={repr(form)[:80]}: its type is json_schema", "output_config.format")
        schema = field(form, "schema", dict, "output_config.format")
        named = {"name": "answer", "schema": schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    return chat


def _thread_refused() -> GatewayError:
    """Clients that keep their conversations on the server send the whole one instead when they read these details."""
    return GatewayError(
        400,
        "thread: this server keeps no threads: send the whole conversation",
        param="thread",
        details={"error_code": "thread_unsupported_request", "unsupported": ["model"]},
    )


# --- answers ----------------------------------------------------------------------------------------------------------


def from_chat(response: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a chat completion's first choice."""
    choice = first_choice(response)
    reason, sequence = _stop(choice, asked)
    return {
        "id": response.get("id"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or asked.get("model") or "",
        "content": list(_blocks(choice.get("message") or {}, response.get("id"))),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(response),
        **token_fields(response, asked),
    }


def _blocks(message: Mapping[str, Any], signature: Any) -> Iterable[dict[str, Any]]:
    """At least one block, because clients read the first without looking whether there is one."""
    thought, text = reasoning_of(message), text_of(dict(message)) or message.get("refusal") or ""
    calls = message.get("tool_calls") or ()
    if thought:
        yield {"type": "thinking", "thinking": thought, "signature": signature}
    if text or not calls:
        yield {"type": "text", "text": text}
    for call in calls:
        function = call.get("function") or {}
        name, given = function.get("name") or "", _input(function.get("arguments") or "")
        yield {"type": "tool_use", "id": call.get("id"), "name": name, "input": given}


def _input(arguments: str) -> dict[str, Any]:
    try:
        given = orjson.loads(arguments or "{}")
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {RAW_ARGUMENTS: arguments}


def _stop(choice: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. Whatever cut an answer off, a client must not take it for a complete one."""
    reason, sequence = choice.get("finish_reason") or "stop", choice.get("stop_reason")
    if reason == "stop" and (choice.get("message") or {}).get("tool_calls"):
        return "tool_use", None
    if reason == "stop" and isinstance(sequence, str) and sequence in (asked.get("stop_sequences") or ()):
        return "stop_sequence", sequence
    return _STOP_REASONS.get(reason, "max_tokens"), None


def _usage(response: Mapping[str, Any]) -> dict[str, Any]:
    """What was read from a cache is not input in Anthropic's count."""
    usage = usage_of(response)
    return {
        "input_tokens": usage["prompt"] - usage["cached"],
        "output_tokens": usage["completion"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage["cached"],
    }


# --- streams ----------------------------------------------------------------------------------------------------------


class MessagesStreamEncoder:
    """Text and thinking as they come, block after block; tool calls at the end, each with its whole input.

    A client acts on a tool call as soon as its block is complete, and the answer is not acknowledged before its trace is
    durable. Besides, clients parse an input while it arrives and die of one that is no JSON, which young policies write.
    """

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._answer = ChatStream()
        self._id: str | None = None
        self._open: str | None = None
        self._kinds: set[str] = set()
        """Of the blocks that were begun."""
        self._num_blocks = 0

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            self._answer.feed(chunk)
            if self._id is None:
                events.append(self._start())
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if choice.get("index", 0) == 0:
                    events += self._piece("thinking", reasoning_of(delta))
                    events += self._piece("text", delta.get("content") or delta.get("refusal") or "")
        return b"".join(events)

    def finish(self) -> bytes:
        message = from_chat(self._answer.response(), self._asked)
        events = list(self._end())
        if "text" not in self._kinds and message["content"][-1]["type"] == "text":
            events += [*self._begin("text"), *self._end()]
        for block in message["content"]:
            if block["type"] == "tool_use":
                events += self._tool_use(block)
        ending = {name: message.pop(name) for name in ("stop_reason", "stop_sequence")}
        extra = token_fields(self._answer.response(), self._asked)
        events.append(_event("message_delta", delta=ending, usage=message["usage"], **extra))
        return b"".join([*events, _event("message_stop")])

    def fail(self, error: GatewayError) -> bytes:
        return event("error", error_to_dict(error))

    def _start(self) -> bytes:
        message = from_chat({**self._answer.response(), "choices": ()}, self._asked)
        self._id = message["id"]
        return _event("message_start", message={**message, "content": [], "stop_reason": None})

    def _piece(self, kind: str, text: str) -> Iterable[bytes]:
        if text:
            if self._open != kind:
                yield from self._end()
                yield from self._begin(kind)
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, kind: str) -> Iterable[bytes]:
        block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
        yield _event("content_block_start", index=self._num_blocks, content_block=block)
        self._open = kind
        self._kinds.add(kind)
        self._num_blocks += 1

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end(self) -> Iterable[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._id})
        if self._open is not None:
            yield _event("content_block_stop", index=self._num_blocks - 1)
        self._open = None

    def _tool_use(self, block: dict[str, Any]) -> Iterable[bytes]:
        yield _event("content_block_start", index=self._num_blocks, content_block={**block, "input": {}})
        self._num_blocks += 1
        yield self._delta({"type": "input_json_delta", "partial_json": ""})
        yield self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()})
        yield _event("content_block_stop", index=self._num_blocks - 1)


def _event(type: str, **data: Any) -> bytes:
    return event(type, {"type": type, **data})
