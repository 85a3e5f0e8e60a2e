"""Anthropic's messages, the way back: chat answers to messages, chunks to Anthropic's events, errors to its error objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from rllm.capture import ChatStream
from rllm.gateway.dialects.base import event, first_choice, reasoning_of, token_fields, usage_of
from rllm.gateway.dialects.fields import is_too_deep
from rllm.gateway.errors import CONTEXT_OVERFLOW, GatewayError
from rllm.types import text_of

RAW_ARGUMENTS = "INVALID_JSON"
"""The only member of a tool's input whose sampled arguments are no JSON object that can be told: Anthropic's format has objects
only."""

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


def render_count(num_tokens: int) -> bytes:
    """The answer of `/v1/messages/count_tokens`."""
    return orjson.dumps({"input_tokens": num_tokens})


def error_to_dict(error: GatewayError) -> dict[str, Any]:
    """An error in Anthropic's form. Clients know a prompt that is too long by how its message begins."""
    message = f"prompt is too long: {error}" if error.code == CONTEXT_OVERFLOW else str(error)
    default = "invalid_request_error" if error.status < 500 else "api_error"
    shown = {"type": _ERROR_TYPES.get(error.status, default), "message": message}
    return {"type": "error", "error": {**shown, "details": error.details} if error.details else shown}


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
    """At least one block, because clients read the first without looking whether there is one.

    An answer that ended in its thinking has no text beside: clients who want a structured answer would read it as one.
    """
    thought, text = reasoning_of(message), text_of(message) or message.get("refusal") or ""
    calls = message.get("tool_calls") or ()
    if thought:
        yield {"type": "thinking", "thinking": thought, "signature": signature}
    if text or not (thought or calls):
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
    return given if isinstance(given, dict) and not is_too_deep(given) else {RAW_ARGUMENTS: arguments}


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
                    events += self._piece("text", text_of(delta) or delta.get("refusal") or "")
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
