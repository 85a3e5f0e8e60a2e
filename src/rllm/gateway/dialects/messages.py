"""Anthropic's messages: requests to chat requests. `messages_output.py` has the way back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

import orjson

from rllm.gateway.dialects.base import WholeConversations
from rllm.gateway.dialects.fields import check_single_chat, field, invalid, objects, parse_object
from rllm.gateway.dialects.messages_output import RAW_ARGUMENTS, MessagesStreamEncoder, error_to_dict, from_chat
from rllm.gateway.errors import DeclinedError, GatewayError
from rllm.types import Message, Trace

_OURS = frozenset(
    # Translated below.
    "messages system stop_sequences tools tool_choice output_config output_format thread "
    # Without a meaning for a chat completion, or for any model but Anthropic's own.
    "cache_control container context_management diagnostics inference_geo mcp_servers metadata service_tier speed "
    "thinking user_profile_id workspace_id betas fallbacks billing_policy fallback_credit_token".split()
)
_RUN_BY_CLIENTS = ("bash_", "browser_", "computer_", "memory_", "text_editor_")
"""How the types of tools begin that a client runs itself, and whose description only Anthropic's models know."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesDialect(WholeConversations):
    """Anthropic's `/v1/messages`."""

    id_prefix = "msg_"
    name = "messages"
    chat_names: Mapping[str, str] = MappingProxyType(
        {
            "stop": "stop_sequences",
            "reasoning_effort": "output_config.effort",
            "response_format[json_schema]": "output_config.format",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            "tool_choice[required]": "tool_choice[any]",
            "tool_choice[function]": "tool_choice[tool]",
        }
    )

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


def to_chat(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request of a message request; members that are not Anthropic's are passed on.

    Raises:
        GatewayError: 400, if it is malformed, or asks for what a chat completion cannot give.
    """
    if asked.get("thread") is not None:
        raise _thread_declined()
    if asked.get("compaction") is not None:
        raise invalid("compaction: this server does not summarise conversations: leave it out", "compaction")
    chat = {name: value for name, value in asked.items() if name not in _OURS and value is not None}
    messages: list[Message] = []
    if asked.get("system"):
        messages.append({"role": "system", "content": _content(asked["system"], "system")})
    for where, message in _shown(objects(asked.get("messages"), "messages")):
        messages += _messages_of(message, where)
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
    elif not asked.get("tools") and choice.get("tool_choice") not in (None, "auto", "none"):
        raise invalid(
            f"tool_choice={asked['tool_choice']!r:.80}: there are no tools: send 'tools' with it", "tool_choice"
        )
    chat |= _output(asked)
    check_single_chat(chat, "a message is one answer: call again, or use chat completions")
    return chat


def _shown(messages: list[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The messages that the model is to see, with their places: a system message may be for one user turn only."""
    last_turn = max((position for position, message in enumerate(messages) if message.get("role") == "user"), default=0)
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if message.get("role") == "system":
            _check_system(message, where)
            if message.get("clear_at") == "next_user_message" and position < last_turn:
                continue
        yield where, message


def _check_system(message: Mapping[str, Any], where: str) -> None:
    clear_at = message.get("clear_at")
    if clear_at not in (None, "never", "next_user_message"):
        raise invalid(f"{where}.clear_at={clear_at!r:.80}: use never or next_user_message", f"{where}.clear_at")
    place = f"{where}.output_config"
    if field(message, "output_config", dict, where, {}).get("effort") is not None:
        raise invalid(f"{place}.effort: a request has one effort: give it in the request's own output_config", place)


def _messages_of(message: Mapping[str, Any], where: str) -> list[Message]:
    """The chat messages of one message: a tool's results are messages of their own there."""
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
            found += [_tool_result(block, place) for block, place in run]
        else:
            found.append({"role": role, "content": _joined([_part(block, place) for block, place in run])})
    return found


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for position, block in enumerate(blocks):
        place = f"{where}.content[{position}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(field(block, "thinking", str, place))
            case "tool_use":
                calls.append(_tool_call(block, place))
            case "text":
                texts.append(_part(block, place))
            case "redacted_thinking":
                pass
            case other:
                raise invalid(f"{place}.type={other!r}: an assistant's message has text, thinking or tool_use", place)
    message: Message = {"role": "assistant", "content": _joined(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = field(block, "input", dict, where, {})
    raw = given.get(RAW_ARGUMENTS) if given.keys() == {RAW_ARGUMENTS} else None
    arguments = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": field(block, "name", str, where), "arguments": arguments}
    return {"id": field(block, "id", str, where), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    content = _content(block.get("content") or "", f"{where}.content")
    if not content and block.get("is_error"):
        content = "The tool failed."
    return {"role": "tool", "tool_call_id": field(block, "tool_use_id", str, where), "content": content}


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """A text or blocks as a chat message's content."""
    if isinstance(value, str):
        return value
    return _joined([_part(block, f"{where}[{position}]") for position, block in enumerate(objects(value, where))])


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text as a string, anything else as parts."""
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
            texts = (
                found
                if isinstance(found, str)
                else "\n".join(field(part, "text", str, f"{where}.content") for part in found)
            )
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
    """A function tool; `None` for one that Anthropic's servers run."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if str(kind).startswith(_RUN_BY_CLIENTS):
            raise _undescribed(str(kind), tool.get("name") or kind)
        return None
    function = {"name": field(tool, "name", str, "tools[]")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {"type": "object"}}}


def _undescribed(kind: str, name: Any) -> GatewayError:
    """Left out without a word, the tool would be waited for in vain: its client is ready to run it."""
    return invalid(
        f"tools[].type={kind!r:.80}: only Anthropic's models know what it does: give {name!r:.80} as a tool with an input_schema",
        "tools",
    )


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


def _thread_declined() -> DeclinedError:
    """Clients that keep their conversations on the server send the whole one instead when they read these details."""
    return DeclinedError(
        400,
        "thread: this server keeps no threads: send the whole conversation",
        param="thread",
        details={"error_code": "thread_unsupported_request", "unsupported": ["model"]},
    )
