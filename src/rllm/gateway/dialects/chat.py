"""OpenAI's chat completions: the wire format that the gateway also speaks inside."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from rllm.capture import strip_chunk
from rllm.gateway.dialects.base import COMMENT, OpenAIDialect, wire_format
from rllm.gateway.dialects.fields import check_chat, field, invalid, named_in, objects
from rllm.gateway.errors import GatewayError
from rllm.gateway.upstream.base import FACTS_KEY
from rllm.types import Trace


class ChatDialect(OpenAIDialect):
    """OpenAI's `/v1/chat/completions`. Requests are checked only for fields that the gateway itself relies on."""

    wire = wire_format("chat")
    id_prefix = "chatcmpl-"
    needs = "'model' and 'messages'"

    def to_chat(self, asked: dict[str, Any], earlier: Mapping[str, Trace]) -> dict[str, Any]:
        check_chat(asked)
        return _with_allowed_tools(asked)

    def render(self, response: dict[str, Any], *, asked: Mapping[str, Any]) -> bytes:
        _fill_head(response, "chat.completion")
        _strip(response, asked)
        return orjson.dumps(response)

    def encoder(self, *, asked: Mapping[str, Any]) -> ChatStreamEncoder:
        return ChatStreamEncoder(asked)


def _with_allowed_tools(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a request with only the tools that its choice allows, because few servers know this choice."""
    choice = asked.get("tool_choice")
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return asked
    allowed = field(choice, "allowed_tools", dict, "tool_choice")
    where = "tool_choice.allowed_tools.tools"
    names = [named_in(tool) for tool in objects(allowed.get("tools"), where)]
    tools = [tool for tool in asked["tools"] if named_in(tool) in names and named_in(tool) is not None]
    if not tools:
        raise invalid(f"{where}: none of them is in 'tools': name some of these", "tool_choice")
    return {**asked, "tools": tools, "tool_choice": allowed.get("mode") or "auto"}


class ChatStreamEncoder:
    """Encoder of chunks as server-sent events; finish reasons, usage and `[DONE]` are held back for the end."""

    keep_alive = COMMENT

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._endings: list[dict[str, Any]] = []
        self._usage: list[dict[str, Any]] = []

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
        events = []
        for chunk in chunks:
            _fill_head(chunk, "chat.completion.chunk")
            _strip(chunk, self._asked)
            if self._hold_back(chunk):
                events.append(b"data: %s\n\n" % orjson.dumps(chunk))
        return b"".join(events)

    def finish(self) -> bytes:
        held = [*self._endings, *self._usage]
        return b"".join([*(b"data: %s\n\n" % orjson.dumps(chunk) for chunk in held), b"data: [DONE]\n\n"])

    def fail(self, error: GatewayError) -> bytes:
        return b"data: %s\n\n" % orjson.dumps(error.to_dict())

    def _hold_back(self, chunk: dict[str, Any]) -> bool:
        """Take the usage and the finish reasons out of a chunk; return whether anything remains to be sent now."""
        usage = chunk.pop("usage", None)
        if usage and self._wants_usage:
            self._usage = [{**chunk, "choices": [], "usage": usage}]  # Some servers count in every chunk.
        choices = chunk.get("choices")
        if not choices:
            return not usage and not self._endings
        early_choices = []
        for choice in choices:
            if choice.get("finish_reason") is None:
                early_choices.append(choice)
                continue
            # Some clients look for the finish reason only in a chunk of its own, so the text goes first.
            ending = {name: value for name, value in choice.items() if name != "token_ids"}
            self._endings.append({**chunk, "choices": [{**ending, "delta": {}, "logprobs": None}]})
            if any((choice.get("delta") or {}).values()) or choice.get("token_ids") or choice.get("logprobs"):
                early = {name: value for name, value in choice.items() if name != "stop_reason"}
                early_choices.append({**early, "finish_reason": None})
        chunk["choices"] = early_choices
        return bool(early_choices)


def _strip(answer: dict[str, Any], asked: Mapping[str, Any]) -> None:
    strip_chunk(answer, asked=asked)
    if not asked.get("return_token_ids"):
        answer.pop(FACTS_KEY, None)


def _fill_head(answer: dict[str, Any], object: str) -> None:
    """Fill in fields that some servers omit and strict clients require."""
    if "created" not in answer:
        answer["created"] = int(time.time())
    if answer.get("object") != object:
        answer["object"] = object
