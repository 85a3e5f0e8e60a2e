"""Anthropic's messages: translation of requests to chat requests, and of chat answers, chunks and errors back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import orjson

from rllm.gateway.dialects.base import (
    Dialect,
    answer_json,
    arguments_object,
    arguments_text,
    assistant_message,
    check_single_chat,
    content_of,
    event,
    field,
    first_choice,
    invalid,
    joined_parts,
    objects,
    present,
    reasoning_of,
    schema_format,
    token_fields,
    tool_call,
    usage_of,
    wire_format,
)
from rllm.gateway.errors import CONTEXT_OVERFLOW, DeclinedError, GatewayError
from rllm.inference.parameters import Table
from rllm.types import JSONMapping, JSONObject, Message, Trace, text_of

_RUN_BY_CLIENTS = ("bash_", "browser_", "computer_", "memory_", "text_editor_")
"""Beginnings of the types of tools that clients run themselves, and whose descriptions only Anthropic's models know."""
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


MESSAGES = Table("""
messages, system, stream | honoured | translated |
model | =model | =model |
max_tokens, temperature, top_p, top_k | honoured | = |
stop_sequences | honoured | passed on as stop |
content[text], content[thinking], content[tool_use], content[tool_result] | honoured | translated |
content[search_result] | honoured | translated | as text
content[redacted_thinking] | no effect | no effect | only the provider that wrote it can read it
content[image] | =content[image_url] | passed on as image_url |
content[document] | =content[file] | passed on as file | as text, if it is text
content[*] | refused | refused | belongs to a tool that a provider runs
tools, tools[custom] | honoured | translated |
tools[bash], tools[browser_toolset], tools[computer] | refused | refused | define it with an input_schema
tools[computer_toolset], tools[memory], tools[text_editor] | refused | refused | define it with an input_schema
tools[*] | named | named | a provider would run it; the model does not see it
tools[].strict | =tools[].strict | passed on |
tools[].input_examples, tools[].allowed_callers | named | named |
tools[].defer_loading | named | named | the model sees the tool at once
tools[].eager_input_streaming | no effect | no effect |
tools[].cache_control | no effect | no effect | common prefixes are cached in any case
tool_choice, tool_choice[auto], tool_choice[none] | honoured | translated |
tool_choice[any] | =tool_choice[required] | translated |
tool_choice[tool] | =tool_choice[function] | translated |
tool_choice.name | honoured | translated |
tool_choice.disable_parallel_tool_use | =parallel_tool_calls | passed on as parallel_tool_calls |
thinking, thinking[adaptive] | honoured | honoured | the model thinks as it does
thinking[enabled], thinking[disabled], thinking[between_tools] | named | named | see `chat_template_kwargs`
thinking.budget_tokens | no effect | no effect | `thinking[enabled]` is named
thinking.display | named | named | thinking is returned as it was sampled
output_config | honoured | translated |
output_config.effort | =reasoning_effort | passed on as reasoning_effort |
output_config.format, output_format | =response_format[json_schema] | passed on as response_format |
output_config.task_budget | named | named |
context_management, container, mcp_servers | named | named |
compaction, thread | refused | refused | send the whole conversation
metadata, service_tier, speed, inference_geo, diagnostics, betas | no effect | no effect |
cache_control | no effect | no effect | common prefixes are cached in any case
user_profile_id, workspace_id, billing_policy, fallbacks, fallback_credit_token | no effect | no effect |
""")


class MessagesDialect(Dialect):
    """Anthropic's `/v1/messages`."""

    wire = wire_format("messages")
    parameters = MESSAGES
    id_prefix = "msg_"
    needs = "'model' and 'messages'"

    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        return to_chat(asked)

    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        return answer_json(from_chat(response, asked))

    def encoder(self, *, asked: JSONMapping) -> MessagesStreamEncoder:
        return MessagesStreamEncoder(asked)

    def render_error(self, error: GatewayError) -> bytes:
        return orjson.dumps(error_to_dict(error))

    def render_models(self, models: Sequence[JSONMapping]) -> bytes:
        shown = [_model(model) for model in models]
        ids = [model["id"] for model in shown] or [None]
        return orjson.dumps({"data": shown, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})

    def render_model(self, model: JSONMapping) -> bytes:
        return orjson.dumps(_model(model))


# --- requests -------------------------------------------------------------------------------------------------------


def to_chat(asked: JSONMapping) -> JSONObject:
    """Return the chat request of a message request; members that are not Anthropic's are passed on.

    Raises:
        GatewayError: 400, if it is malformed, or asks for something that a chat completion cannot give.
    """
    if asked.get("thread") is not None:
        # Clients that keep conversations on the server send the whole one instead when they read these details.
        raise DeclinedError(
            400,
            "thread: this server stores no threads: send the whole conversation",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["model"]},
        )
    if asked.get("compaction") is not None:
        raise invalid("compaction: this server does not summarize conversations: leave it out", "compaction")
    chat = {name: value for name, value in asked.items() if name not in MESSAGES.own_fields and value is not None}
    messages: list[Message] = []
    if asked.get("system"):
        messages.append({"role": "system", "content": content_of(asked["system"], "system", _part)})
    given = objects(asked.get("messages"), "messages")
    last_turn = max((position for position, message in enumerate(given) if message.get("role") == "user"), default=0)
    for position, message in enumerate(given):
        # A system message may be for one user turn only.
        if message.get("clear_at") != "next_user_message" or position >= last_turn:
            messages += _messages_of(message, f"messages[{position}]")
    if messages and messages[-1]["role"] == "assistant":
        raise invalid(
            "the last message is the assistant's, and answers cannot be prefilled: end with a user message",
            "messages",
        )
    chat["messages"] = messages
    if asked.get("stop_sequences"):
        chat["stop"] = asked["stop_sequences"]
    choice = _tool_choice(asked)
    if tools := [found for tool in objects(asked.get("tools") or [], "tools") if (found := _tool(tool))]:
        chat |= {"tools": tools, **choice}
    elif not asked.get("tools") and choice.get("tool_choice") not in (None, "auto", "none"):
        chat |= choice
    chat |= _output(asked)
    check_single_chat(chat, "a message is one answer: call again, or use chat completions")
    return chat


def _messages_of(message: JSONMapping, where: str) -> list[Message]:
    """Return the chat messages of one message: tool results become messages of their own."""
    role = field(message, "role", str, where)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, where)]
    if not blocks:
        return [{"role": role, "content": ""}]
    found: list[Message] = []
    placed = ((block, f"{where}.content[{position}]") for position, block in enumerate(blocks))
    for is_result, run in groupby(placed, key=lambda item: item[0].get("type") == "tool_result"):
        if is_result:
            for block, place in run:
                result = content_of(block.get("content") or "", f"{place}.content", _part)
                result = result or ("The tool failed." if block.get("is_error") else "")
                call_id = field(block, "tool_use_id", str, place)
                found.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            found.append({"role": role, "content": joined_parts([_part(block, place) for block, place in run])})
    return found


def _assistant(blocks: list[JSONObject], where: str) -> Message:
    texts: list[JSONObject] = []
    thoughts: list[str] = []
    calls: list[JSONObject] = []
    for position, block in enumerate(blocks):
        place = f"{where}.content[{position}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(field(block, "thinking", str, place))
            case "tool_use":
                arguments = arguments_text(field(block, "input", dict, place, {}))
                calls.append(tool_call(field(block, "id", str, place), field(block, "name", str, place), arguments))
            case "text":
                texts.append(_part(block, place))
            case "redacted_thinking":
                pass
            case other:
                raise invalid(f"{place}.type={other!r}: an assistant's message has text, thinking or tool_use", place)
    return assistant_message(texts, thoughts, calls)


def _part(block: JSONMapping, where: str) -> JSONObject:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": field(block, "text", str, where)}
        case "image":
            return {"type": "image_url", "image_url": {"url": _url(field(block, "source", dict, where), where)}}
        case "document":
            source, title = field(block, "source", dict, where), block.get("title")
            if source.get("type") == "text":
                text = field(source, "data", str, f"{where}.source")
                return {"type": "text", "text": f"{title}\n{text}" if title else text}
            return {"type": "file", "file": {"filename": title or "document", "file_data": _url(source, where)}}
        case "search_result":
            found = content_of(block.get("content") or "", f"{where}.content", _part)
            texts = found if isinstance(found, str) else "\n".join(part.get("text") or "" for part in found)
            return {"type": "text", "text": "\n".join([*present(block, "title", "source").values(), texts])}
        case "tool_reference":
            return {"type": "text", "text": f"The tool {field(block, 'tool_name', str, where)} can be called now."}
        case other:
            raise invalid(f"{where}.type={other!r}: this block has no counterpart in a chat completion", where)


def _url(source: JSONMapping, where: str) -> str:
    match source.get("type"):
        case "base64":
            media_type = field(source, "media_type", str, f"{where}.source")
            return f"data:{media_type};base64,{field(source, 'data', str, f'{where}.source')}"
        case "url":
            return field(source, "url", str, f"{where}.source")
        case other:
            raise invalid(f"{where}.source.type={other!r}: send base64 or url", f"{where}.source")


def _tool(tool: JSONMapping) -> JSONObject | None:
    """Return a function tool, or `None` for one that Anthropic's servers run."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if str(kind).startswith(_RUN_BY_CLIENTS):
            # If it were dropped silently, its client would wait for a call that never comes.
            raise invalid(
                f"tools[].type={str(kind)!r:.80}: only Anthropic's models know what it does: give "
                f"{tool.get('name') or kind!r:.80} as a tool with an input_schema",
                "tools",
            )
        return None
    function = {"name": field(tool, "name", str, "tools[]"), **present(tool, "description", "strict")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {"type": "object"}}}


def _tool_choice(asked: JSONMapping) -> JSONObject:
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


def _output(asked: JSONMapping) -> JSONObject:
    """Return the chat fields of `output_config`: reasoning effort and response format."""
    config = field(asked, "output_config", dict, "", {})
    chat: JSONObject = {}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    form = config.get("format") or asked.get("output_format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise invalid(f"output_config.format={repr(form)[:80]}: its type is json_schema", "output_config.format")
        chat["response_format"] = schema_format(field(form, "schema", dict, "output_config.format"))
    return chat


# --- answers --------------------------------------------------------------------------------------------------------


def error_to_dict(error: GatewayError) -> JSONObject:
    """Return an error in Anthropic's form. Clients recognize a prompt that is too long by how its message begins."""
    message = f"prompt is too long: {error}" if error.code == CONTEXT_OVERFLOW else str(error)
    default = "invalid_request_error" if error.status < 500 else "api_error"
    shown = {"type": _ERROR_TYPES.get(error.status, default), "message": message}
    return {"type": "error", "error": {**shown, "details": error.details} if error.details else shown}


def from_chat(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return the message of a chat completion's first choice."""
    choice = first_choice(response)
    reason, sequence = _stop(choice, asked)
    usage = usage_of(response)
    return {
        "id": response.get("id"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or asked.get("model") or "",
        "content": list(_blocks(choice.get("message") or {}, response.get("id"))),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": {
            "input_tokens": usage["prompt"] - usage["cached"],  # Without those read from a cache.
            "output_tokens": usage["completion"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage["cached"],
        },
        **token_fields(response, asked),
    }


def _blocks(message: JSONMapping, signature: Any) -> Iterable[JSONObject]:
    """Yield the content blocks of an answer: at least one, because clients read the first without checking.

    An answer that ended in its thinking has no text block: clients that want a structured answer would parse an empty
    one.
    """
    thought, text = reasoning_of(message), text_of(message) or message.get("refusal") or ""
    calls = message.get("tool_calls") or ()
    if thought:
        yield {"type": "thinking", "thinking": thought, "signature": signature}
    if text or not (thought or calls):
        yield {"type": "text", "text": text}
    for call in calls:
        function = call.get("function") or {}
        name, given = function.get("name") or "", arguments_object(function.get("arguments") or "")
        yield {"type": "tool_use", "id": call.get("id"), "name": name, "input": given}


def _stop(choice: JSONMapping, asked: JSONMapping) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`. An answer that was cut off must never look like a complete one."""
    reason, sequence = choice.get("finish_reason") or "stop", choice.get("stop_reason")
    if reason == "stop" and (choice.get("message") or {}).get("tool_calls"):
        return "tool_use", None
    if reason == "stop" and isinstance(sequence, str) and sequence in (asked.get("stop_sequences") or ()):
        return "stop_sequence", sequence
    return _STOP_REASONS.get(reason, "max_tokens"), None


class MessagesStreamEncoder:
    """Encoder that sends text and thinking as they come, and tool calls at the end, each with its whole input.

    Clients act on a tool call as soon as its block is complete, and an answer is not acknowledged before its trace is
    durable. In addition, clients parse an input while it arrives and crash on invalid JSON, which untrained policies
    write.
    """

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, asked: JSONMapping) -> None:
        self._asked = asked
        self._id: str | None = None
        self._open: str | None = None
        self._kinds: set[str] = set()
        """Kinds of the blocks begun so far."""
        self._num_blocks = 0

    def feed(self, chunks: list[JSONObject]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            if self._id is None:
                message = from_chat({**chunk, "choices": ()}, self._asked)
                self._id = message["id"]
                events.append(_event("message_start", message={**message, "content": [], "stop_reason": None}))
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if choice.get("index", 0) == 0:
                    events += self._piece("thinking", reasoning_of(delta))
                    events += self._piece("text", text_of(delta) or delta.get("refusal") or "")
        return b"".join(events)

    def finish(self, response: JSONMapping) -> bytes:
        message = from_chat(response, self._asked)
        events = list(self._end())
        if "text" not in self._kinds and message["content"][-1]["type"] == "text":
            events += [*self._begin("text"), *self._end()]
        for block in message["content"]:
            if block["type"] == "tool_use":
                events += self._tool_use(block)
        ending = {name: message.pop(name) for name in ("stop_reason", "stop_sequence")}
        extra = token_fields(response, self._asked)
        events.append(_event("message_delta", delta=ending, usage=message["usage"], **extra))
        return b"".join([*events, _event("message_stop")])

    def fail(self, error: GatewayError) -> bytes:
        return event("error", error_to_dict(error))

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

    def _delta(self, delta: JSONMapping) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end(self) -> Iterable[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._id})
        if self._open is not None:
            yield _event("content_block_stop", index=self._num_blocks - 1)
        self._open = None

    def _tool_use(self, block: JSONObject) -> Iterable[bytes]:
        yield _event("content_block_start", index=self._num_blocks, content_block={**block, "input": {}})
        self._num_blocks += 1
        yield self._delta({"type": "input_json_delta", "partial_json": ""})
        yield self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()})
        yield _event("content_block_stop", index=self._num_blocks - 1)


def _event(type: str, **data: Any) -> bytes:
    return event(type, {"type": type, **data})


_LATEST = 253_402_300_799
"""Last second whose year has four digits; some servers report milliseconds."""


def _model(model: JSONMapping) -> JSONObject:
    created = datetime.fromtimestamp(min(max(model.get("created") or 0, 0), _LATEST), UTC)
    model_id = model.get("id")
    return {
        "type": "model",
        "id": model_id,
        "display_name": model_id,
        "created_at": created.isoformat(),
        "lifecycle": "active",
    }
