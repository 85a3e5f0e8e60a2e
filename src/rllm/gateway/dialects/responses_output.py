"""OpenAI's responses, the way back: chat answers to output items, chunks to typed events in their order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from rllm.capture import ChatStream
from rllm.gateway.dialects.base import COMMENT, created_at, event, first_choice, reasoning_of, token_fields, usage_of
from rllm.gateway.errors import GatewayError
from rllm.types import Message, text_of

ENCRYPTED = "rllm:"
"""How reasoning begins that a client carries without looking into it (it is not secret here)."""

CUSTOM_INPUT = "input"
"""A custom tool takes plain text; the model is told of a function with this one argument."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "max_output_tokens"}
"""Why an answer is not complete, by finish reason."""


def from_chat(response: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The response of a chat completion's first choice; it repeats what was asked for, as clients expect."""
    choice = first_choice(response)
    reason = _INCOMPLETE.get(choice.get("finish_reason") or "stop")
    items = output_items(choice.get("message") or {}, str(response.get("id")), asked)
    if items and reason:
        items[-1]["status"] = "incomplete"
    _add_logprobs(items, choice, asked)
    return {
        **_head(response, asked),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "completed_at": None if reason else int(time.time()),
        "output": items,
        "usage": _usage(response),
        **token_fields(response, asked),
    }


def broken_off(response: Mapping[str, Any], *, cancelled: bool, reason: str) -> dict[str, Any]:
    """The response of `from_chat` whose answer broke off, because its client left (`cancelled`) or for another reason."""
    output = [*response["output"][:-1], *({**item, "status": "incomplete"} for item in response["output"][-1:])]
    return {
        **response,
        "status": "cancelled" if cancelled else "failed",
        "error": None if cancelled else {"code": "server_error", "message": reason},
        "incomplete_details": None,
        "completed_at": None,
        "output": output,
    }


def output_items(message: Message, response_id: str, asked: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """What an assistant's message holds, as items: reasoning, the message, its tool calls. Their ids name the response."""
    asked = asked or {}
    own = response_id.removeprefix("resp_")
    items: list[dict[str, Any]] = []
    if thought := reasoning_of(message):
        items.append(_reasoning(own, thought))
    calls = message.get("tool_calls") or ()
    parts = _parts(message)
    if parts or not calls:
        items.append(_message(own, parts or [_text_part("")]))
    custom = _custom_tools(asked)
    items += [_call(own, position, call, custom) for position, call in enumerate(calls)]
    return items


def includes(asked: Mapping[str, Any], name: str) -> bool:
    """Whether a request wants something that is left out otherwise."""
    included = asked.get("include")
    return isinstance(included, list) and name in included


def _head(response: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """All but what the answer itself says."""
    text = asked.get("text") or {}
    reasoning = asked.get("reasoning") or {}
    return {
        "id": response.get("id"),
        "object": "response",
        "created_at": created_at(response),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "max_tool_calls": asked.get("max_tool_calls"),
        "metadata": asked.get("metadata") or {},
        "model": response.get("model") or asked.get("model") or "",
        "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "previous_response_id": asked.get("previous_response_id"),
        "prompt_cache_key": asked.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": asked.get("safety_identifier"),
        "service_tier": "default",
        "store": asked.get("store", True),
        "temperature": asked.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_logprobs": asked.get("top_logprobs") or 0,
        "top_p": asked.get("top_p", 1.0),
        "truncation": asked.get("truncation") or "disabled",
        "usage": None,
        "user": asked.get("user"),
    }


def _reasoning(own: str, thought: str) -> dict[str, Any]:
    """Told twice, because some clients carry on nothing but what they cannot read."""
    return {
        "id": f"rs_{own}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thought}],
        "encrypted_content": f"{ENCRYPTED}{thought}",
    }


def _message(own: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": "completed", "content": parts}


def _parts(message: Message) -> list[dict[str, Any]]:
    text = text_of(message)
    parts = [_text_part(text)] if text else []
    return [*parts, {"type": "refusal", "refusal": message["refusal"]}] if message.get("refusal") else parts


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(own: str, position: int, call: Mapping[str, Any], custom: set[str]) -> dict[str, Any]:
    function = call.get("function") or {}
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    shared = {"id": f"fc_{own}_{position}", "call_id": call.get("id"), "name": name, "status": "completed"}
    if name in custom:
        return {**shared, "type": "custom_tool_call", "input": _custom_input(arguments)}
    return {**shared, "type": "function_call", "arguments": arguments}


def _custom_tools(asked: Mapping[str, Any]) -> set[str]:
    items = asked["input"] if isinstance(asked.get("input"), list) else ()
    added = (tool for item in items if item.get("type") == "additional_tools" for tool in item["tools"])
    return {tool["name"] for tool in _unfolded([*(asked.get("tools") or ()), *added]) if tool.get("type") == "custom"}


def _unfolded(tools: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The tools, and in the place of a namespace those in it."""
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from _unfolded(tool["tools"])
        else:
            yield tool


def _custom_input(arguments: str) -> str:
    """The text meant for a custom tool; what was sampled, where it is not in the form that was asked for."""
    try:
        given = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def _add_logprobs(items: list[dict[str, Any]], choice: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if not includes(asked, "message.output_text.logprobs"):
        return
    for item in items:
        if item["type"] == "message" and item["content"][0]["type"] == "output_text":
            entries = (choice.get("logprobs") or {}).get("content") or ()
            item["content"][0]["logprobs"] = [_logprob(entry) for entry in entries]


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion's entry; here the bytes of a token are always a list, and those that nobody knows are none."""
    others = [{**other, "bytes": other.get("bytes") or []} for other in entry.get("top_logprobs") or ()]
    return {**entry, "bytes": entry.get("bytes") or [], "top_logprobs": others}


def _usage(response: Mapping[str, Any]) -> dict[str, Any]:
    usage = usage_of(response)
    return {
        "input_tokens": usage["prompt"],
        "input_tokens_details": {"cached_tokens": usage["cached"], "cache_write_tokens": 0},
        "output_tokens": usage["completion"],
        "output_tokens_details": {"reasoning_tokens": usage["reasoning"]},
        "total_tokens": usage["prompt"] + usage["completion"],
    }


# --- streams ----------------------------------------------------------------------------------------------------------


class ResponsesStreamEncoder:
    """Items in the order in which they begin; reasoning ends where the message begins, and both where a tool call does.

    Tool calls end with the answer, because a client acts on one as soon as it is done, and the answer is not acknowledged
    before its trace is durable. What an upstream adds to an item that has ended stands in the last event only.
    """

    keep_alive = COMMENT

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._custom = _custom_tools(asked)
        self._answer = ChatStream()
        self._head: dict[str, Any] = {}
        self._own = ""
        self._positions: dict[str, int] = {}
        """Of the items that were begun, by id."""
        self._ended: set[str] = set()
        self._calls: dict[int, dict[str, Any]] = {}
        """Tool calls as far as they have come, by the upstream's index."""
        self._sequence = 0

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            self._answer.feed(chunk)
            if not self._head:
                events += self._start(chunk)
            for choice in chunk.get("choices") or ():
                if choice.get("index", 0) == 0:
                    events += self._delta(choice.get("delta") or {})
        return b"".join(events)

    def finish(self) -> bytes:
        response = {**self._whole(), "created_at": self._head["created_at"]}
        by_id = {item["id"]: item for item in response["output"]}
        events: list[bytes] = []
        for item_id, item in by_id.items():
            if item_id not in self._positions:
                events += self._begin(item)
                if item.get("arguments"):
                    events.append(self._of(item_id, "function_call_arguments.delta", delta=item["arguments"]))
        order = sorted(by_id, key=self._positions.__getitem__)
        for item_id in order:
            if item_id not in self._ended:
                events += self._end(by_id[item_id])
        response["output"] = [by_id[item_id] for item_id in order]
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def fail(self, error: GatewayError) -> bytes:
        code, param = str(error.code or "server_error"), error.to_dict(prompt="input")["error"]["param"]
        told = self._event("error", code=code, message=str(error), param=param)
        failed = {**(self._head or _head({}, self._asked)), "status": "failed"}
        failed["error"] = {"code": code, "message": str(error)}
        return told + self._event("response.failed", response=failed)

    def _start(self, chunk: Mapping[str, Any]) -> Iterable[bytes]:
        self._head = _head(chunk, self._asked)
        self._own = str(self._head["id"]).removeprefix("resp_")
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def _delta(self, delta: Mapping[str, Any]) -> Iterable[bytes]:
        thought, reasoning = reasoning_of(delta), _reasoning(self._own, "")
        if thought and reasoning["id"] not in self._ended:
            yield from self._begin(reasoning)
            yield self._of(reasoning["id"], "reasoning_text.delta", content_index=0, delta=thought)
        if text := text_of(delta):
            message = _message(self._own, [])
            yield from self._end_spoken("rs_")
            if message["id"] not in self._ended:
                yield from self._begin(message)
                yield self._of(message["id"], "output_text.delta", content_index=0, delta=text, logprobs=[])
        for piece in delta.get("tool_calls") or ():
            yield from self._call_piece(piece)

    def _call_piece(self, piece: Mapping[str, Any]) -> Iterable[bytes]:
        """A function call grows by its pieces; a custom tool's input is known when the whole call is."""
        call = self._calls.setdefault(
            piece["index"], {"position": len(self._calls), "id": None, "name": "", "held": ""}
        )
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        call["held"] += function.get("arguments") or ""
        if not (call["id"] and call["name"]):
            return
        item = _call(self._own, call["position"], {"id": call["id"], "function": {"name": call["name"]}}, self._custom)
        yield from self._end_spoken("rs_", "msg_")
        yield from self._begin(item)
        if call["held"] and item["type"] == "function_call":
            yield self._of(item["id"], "function_call_arguments.delta", delta=call["held"])
            call["held"] = ""

    def _begin(self, item: Mapping[str, Any]) -> Iterable[bytes]:
        """The events that announce an item, unless they were sent."""
        if item["id"] in self._positions:
            return
        self._positions[item["id"]] = len(self._positions)
        empty = {**item, "status": "in_progress"}
        empty |= {name: type(item[name])() for name in ("content", "arguments", "input") if name in item}
        empty.pop("encrypted_content", None)
        yield self._event("response.output_item.added", output_index=self._positions[item["id"]], item=empty)
        refused = any(part["type"] == "refusal" for part in item.get("content", ())[:1])
        if item["type"] == "message" and not refused:
            yield self._of(item["id"], "content_part.added", content_index=0, part=_text_part(""))
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            yield self._of(item["id"], "content_part.added", content_index=0, part=part)

    def _end_spoken(self, *prefixes: str) -> Iterable[bytes]:
        """The events that end these items, where they are open."""
        open_ids = {f"{prefix}{self._own}" for prefix in prefixes} & self._positions.keys() - self._ended
        if open_ids:
            for item in self._whole()["output"]:
                if item["id"] in open_ids:
                    yield from self._end(item)

    def _end(self, item: Mapping[str, Any]) -> Iterable[bytes]:
        self._ended.add(item["id"])
        match item["type"]:
            case "function_call":
                yield self._of(
                    item["id"], "function_call_arguments.done", arguments=item["arguments"], name=item["name"]
                )
            case "custom_tool_call":
                yield self._of(item["id"], "custom_tool_call_input.delta", delta=item["input"])
                yield self._of(item["id"], "custom_tool_call_input.done", input=item["input"])
            case "reasoning":
                yield from self._end_parts(item, "reasoning_text.done")
            case "message":
                yield from self._end_parts(item, "output_text.done", logprobs=[])
        position = self._positions[item["id"]]
        yield self._event("response.output_item.done", output_index=position, item=item)

    def _end_parts(self, item: Mapping[str, Any], name: str, **extra: Any) -> Iterable[bytes]:
        for index, part in enumerate(item["content"]):
            at = {"content_index": index}
            if part["type"] == "refusal":
                yield self._of(item["id"], "content_part.added", **at, part={**part, "refusal": ""})
                yield self._of(item["id"], "refusal.delta", **at, delta=part["refusal"])
                yield self._of(item["id"], "refusal.done", **at, refusal=part["refusal"])
            else:
                yield self._of(item["id"], name, **at, text=part["text"], **extra)
            yield self._of(item["id"], "content_part.done", **at, part=part)

    def _of(self, item_id: str, event_name: str, **data: Any) -> bytes:
        position = self._positions[item_id]
        return self._event(f"response.{event_name}", item_id=item_id, output_index=position, **data)

    def _whole(self) -> dict[str, Any]:
        return from_chat(self._answer.response(), self._asked)

    def _event(self, type: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(type, {"type": type, "sequence_number": self._sequence - 1, **data})
