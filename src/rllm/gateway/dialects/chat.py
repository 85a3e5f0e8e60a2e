"""OpenAI's chat completions: the wire format that the gateway also speaks inside."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from rllm.capture import strip_chunk
from rllm.gateway.errors import GatewayError
from rllm.gateway.upstream.base import FACTS_KEY

_MAX_CHOICES = 128


class ChatDialect:
    """Requests are checked for what the gateway itself relies on; the rest is the upstream's business."""

    def parse(self, body: bytes) -> dict[str, Any]:
        try:
            request = orjson.loads(body)
        except ValueError as error:
            raise _invalid(f"the request body is not valid JSON: {error}") from error
        if not isinstance(request, dict):
            raise _invalid(f"the request body is a JSON {_kind(request)}: send an object with 'model' and 'messages'")
        _check_messages(request.get("messages"))
        n = request.get("n")
        if n is not None and not (type(n) is int and 1 <= n <= _MAX_CHOICES):
            raise _invalid(f"n={n!r}: use a whole number from 1 to {_MAX_CHOICES}", "n")
        for name, types in _TYPES.items():
            if request.get(name) is not None and not isinstance(request[name], types):
                raise _invalid(f"{name}={repr(request[name])[:80]}: its type is wrong", name)
        return request

    def render(self, response: dict[str, Any], *, asked: Mapping[str, Any]) -> bytes:
        _complete_head(response, "chat.completion")
        _strip(response, asked)
        return orjson.dumps(response)

    def encoder(self, *, asked: Mapping[str, Any]) -> ChatStreamEncoder:
        return ChatStreamEncoder(asked)

    def render_error(self, error: GatewayError) -> bytes:
        return orjson.dumps(error.to_dict())


class ChatStreamEncoder:
    """Chunks as server-sent events, one for one; finish reasons, usage and `[DONE]` are held back for the end."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._endings: list[dict[str, Any]] = []
        self._usage: list[dict[str, Any]] = []

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
        events = []
        for chunk in chunks:
            _complete_head(chunk, "chat.completion.chunk")
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
        """Take the usage and the finish reasons out of a chunk; returns whether anything is left to send now."""
        usage = chunk.pop("usage", None)
        choices = chunk.get("choices")
        if not choices:
            if usage and self._wants_usage:
                self._usage = [{**chunk, "choices": [], "usage": usage}]
            return not usage and not self._endings
        left = []
        for choice in choices:
            if choice.get("finish_reason") is None:
                left.append(choice)
                continue
            # Some clients look for the finish reason only in a chunk of its own, so what was said goes first.
            ending = {name: value for name, value in choice.items() if name != "token_ids"}
            self._endings.append({**chunk, "choices": [{**ending, "delta": {}, "logprobs": None}]})
            if any((choice.get("delta") or {}).values()) or choice.get("token_ids"):
                left.append({**choice, "finish_reason": None})
        chunk["choices"] = left
        return bool(left)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "tools": list,
    "logprobs": (bool, int),
}


def _strip(answer: dict[str, Any], asked: Mapping[str, Any]) -> None:
    strip_chunk(answer, asked=asked)
    if not asked.get("return_token_ids"):
        answer.pop(FACTS_KEY, None)


def _complete_head(answer: dict[str, Any], object: str) -> None:
    """Fill in what a sloppy server leaves out and strict clients insist on."""
    if "created" not in answer:
        answer["created"] = int(time.time())
    if answer.get("object") != object:
        answer["object"] = object


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        given = "missing" if messages is None else "empty" if messages == [] else f"a JSON {_kind(messages)}"
        raise _invalid(f"'messages' is {given}: send a list of at least one message", "messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(
                f"messages[{position}]={repr(message)[:80]}: use an object with a 'role'", f"messages[{position}]"
            )


def _invalid(message: str, param: str | None = None) -> GatewayError:
    return GatewayError(400, message, param=param)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
