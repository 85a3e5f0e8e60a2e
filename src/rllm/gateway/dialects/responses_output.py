"""OpenAI's responses, the way back: chat answers to output items, and chunks to typed events.

Log-probabilities are those of the tokens that spell the text: a chat completion has an entry for each sampled token,
including those of its reasoning, its tool calls and its end.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from rllm.capture import ChatStream
from rllm.gateway.dialects.base import (
    COMMENT,
    bytes_of,
    created_at,
    event,
    first_choice,
    reasoning_of,
    token_fields,
    usage_of,
)
from rllm.gateway.dialects.responses_tools import Tools, custom_input
from rllm.gateway.errors import GatewayError
from rllm.types import JSONMapping, JSONObject, Message, text_of

ENCRYPTED = "rllm:"
"""Beginning of reasoning that clients carry as opaque text (it is not secret here)."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "max_output_tokens"}
"""Reason of an incomplete answer, by finish reason."""


def from_chat(response: JSONMapping, asked: JSONMapping, *, logprobs: list[JSONObject] | None = None) -> JSONObject:
    """Return the response of a chat completion's first choice; it repeats fields of its request, as clients expect.

    Args:
        response: the chat completion.
        asked: the request.
        logprobs: those of its text, where they are known already.
    """
    choice = first_choice(response)
    reason = _INCOMPLETE.get(choice.get("finish_reason") or "stop")
    items = output_items(choice.get("message") or {}, str(response.get("id")), asked)
    if reason:
        items = _cut_off(items)
    if wants_logprobs(asked):
        _add_logprobs(items, logprobs_of(choice) if logprobs is None else logprobs)
    return {
        **head_of(response, asked),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "completed_at": None if reason else int(time.time()),
        "output": items,
        "usage": _usage(response),
        **token_fields(response, asked),
    }


def broken_off(response: JSONMapping, *, cancelled: bool, reason: str) -> JSONObject:
    """Return a response whose answer broke off, because its client left (`cancelled`) or for another reason."""
    output = [*response["output"][:-1], *({**item, "status": "incomplete"} for item in response["output"][-1:])]
    return {
        **response,
        "status": "cancelled" if cancelled else "failed",
        "error": None if cancelled else {"code": "server_error", "message": reason},
        "incomplete_details": None,
        "completed_at": None,
        "output": output,
    }


def output_items(message: Message, response_id: str, asked: JSONMapping | None = None) -> list[JSONObject]:
    """Return the items of an assistant's message: reasoning, text, tool calls. Their ids name the response."""
    tools = Tools(asked or {})
    own = response_id.removeprefix("resp_")
    items: list[JSONObject] = []
    if thought := reasoning_of(message):
        items.append(reasoning_item(own, thought))
    calls = message.get("tool_calls") or ()
    parts = _parts(message)
    if parts or not calls:
        items.append(message_item(own, parts or [text_part("")]))
    items += [call_item(own, position, call, tools) for position, call in enumerate(calls)]
    return items


def _cut_off(items: list[JSONObject]) -> list[JSONObject]:
    """Return the items of an incomplete answer: without an empty message, which clients would parse."""
    *before, last = items
    if before and last.get("content") == [text_part("")]:
        return _cut_off(before)
    return [*before, {**last, "status": "incomplete"}]


def wants_logprobs(asked: JSONMapping) -> bool:
    """Return whether a request wants the log probabilities of the text, which are left out otherwise."""
    included = asked.get("include")
    return bool(asked.get("top_logprobs")) or (
        isinstance(included, list) and "message.output_text.logprobs" in included
    )


def head_of(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return all fields but those of the answer itself."""
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


def reasoning_item(own: str, thought: str) -> JSONObject:
    """Return reasoning as an item; twice, because some clients send back only the opaque text."""
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


def _parts(message: Message) -> list[JSONObject]:
    text = text_of(message)
    parts = [text_part(text)] if text else []
    return [*parts, {"type": "refusal", "refusal": message["refusal"]}] if message.get("refusal") else parts


def text_part(text: str) -> JSONObject:
    """Return a part of a message, without log-probabilities."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(own: str, position: int, call: JSONMapping, tools: Tools) -> JSONObject:
    """Return the item of a chat's tool call, the one at this position."""
    function = call.get("function") or {}
    tool, arguments = tools.called(function.get("name") or ""), function.get("arguments") or ""
    item = {"id": f"fc_{own}_{position}", "call_id": call.get("id"), "name": tool.name, "status": "completed"}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.is_custom:
        return {**item, "type": "custom_tool_call", "input": custom_input(arguments)}
    return {**item, "type": "function_call", "arguments": arguments}


def _add_logprobs(items: Iterable[JSONMapping], logprobs: list[JSONObject]) -> None:
    for item in items:
        if item["type"] == "message" and item["content"][0]["type"] == "output_text":
            item["content"][0]["logprobs"] = logprobs


def _usage(response: JSONMapping) -> JSONObject:
    usage = usage_of(response)
    return {
        "input_tokens": usage["prompt"],
        "input_tokens_details": {"cached_tokens": usage["cached"], "cache_write_tokens": 0},
        "output_tokens": usage["completion"],
        "output_tokens_details": {"reasoning_tokens": usage["reasoning"]},
        "total_tokens": usage["prompt"] + usage["completion"],
    }


# --- log-probabilities -----------------------------------------------------------------------------------------------


class TextLogprobs:
    """Assignment of a stream's log-probabilities to the pieces of its text.

    An entry whose piece is still to come, like the first half of a character, is held back.
    """

    def __init__(self) -> None:
        self.given: list[JSONObject] = []
        """Entries of all pieces so far."""
        self._held: list[JSONMapping] = []

    def hold(self, entries: Sequence[JSONMapping]) -> None:
        """Take the entries of a chunk, before its text."""
        self._held += entries

    def skip(self, text: str) -> None:
        """Drop the entries of other text of the chunk; all that are held, if none spell it."""
        _, end = _where_spelled(text, self._held) or (0, len(self._held))
        del self._held[:end]

    def of(self, text: str) -> list[JSONObject]:
        """Return the entries of the next piece; all that are held, if none spell it."""
        start, end = _where_spelled(text, self._held) or (0, len(self._held))
        entries = [_as_typed(entry) for entry in self._held[start:end]]
        del self._held[:end]
        self.given += entries
        return entries


def logprobs_of(choice: JSONMapping) -> list[JSONObject]:
    """Return the entries of a whole answer's text, which follows its reasoning; all entries, if none spell it."""
    message = choice.get("message") or {}
    text = text_of(message)
    if not text:
        return []
    entries = entries_of(choice)
    _, thought = _where_spelled(reasoning_of(message), entries) or (0, 0)
    start, end = _where_spelled(text, entries[thought:]) or (-thought, len(entries))
    return [_as_typed(entry) for entry in entries[thought + start : thought + end]]


def entries_of(choice: JSONMapping) -> Sequence[JSONMapping]:
    """Return the entries of a choice, whole or of a chunk."""
    return (choice.get("logprobs") or {}).get("content") or ()


def _where_spelled(text: str, entries: Sequence[JSONMapping]) -> tuple[int, int] | None:
    """Return the range of the entries whose tokens first spell a text, even if they spell a little around it."""
    tokens = [bytes_of(entry) for entry in entries]
    start = b"".join(tokens).find(text.encode())
    if start < 0 or not text:
        return None
    ends = list(accumulate(len(token) for token in tokens))
    return bisect_right(ends, start), bisect_left(ends, start + len(text.encode())) + 1


def _as_typed(entry: JSONMapping) -> JSONObject:
    """Return a chat completion's entry with the bytes of its tokens as lists; unknown ones are empty."""
    others = [{**other, "bytes": other.get("bytes") or []} for other in entry.get("top_logprobs") or ()]
    return {**entry, "bytes": entry.get("bytes") or [], "top_logprobs": others}


# --- streams ---------------------------------------------------------------------------------------------------------


class ResponsesStreamEncoder:
    """Encoder that sends items in the order in which they begin.

    Reasoning ends where the message begins, and both end where a tool call begins. Tool calls end with the answer,
    because clients act on one as soon as it ends, and an answer is not acknowledged before its trace is durable.
    Additions of an upstream to an item that has ended are in the last event only.
    """

    keep_alive = COMMENT

    def __init__(self, asked: JSONMapping) -> None:
        self._asked = asked
        self._tools = Tools(asked)
        self._answer = ChatStream()
        self._head: JSONObject = {}
        self._own = ""
        self._positions: dict[str, int] = {}
        """Positions of the items begun so far, by id."""
        self._ended: set[str] = set()
        self._calls: dict[int, JSONObject] = {}
        """Tool calls so far, by the upstream's index."""
        self._wants_logprobs = wants_logprobs(asked)
        self._logprobs = TextLogprobs()
        self._sequence = 0

    def feed(self, chunks: list[JSONObject]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            self._answer.feed(chunk)
            if not self._head:
                events += self._start(chunk)
            for choice in chunk.get("choices") or ():
                if choice.get("index", 0) == 0:
                    if self._wants_logprobs:
                        self._logprobs.hold(entries_of(choice))
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
        error_event = self._event("error", code=code, message=str(error), param=param)
        failed = {**(self._head or head_of({}, self._asked)), "status": "failed"}
        failed["error"] = {"code": code, "message": str(error)}
        return error_event + self._event("response.failed", response=failed)

    def _start(self, chunk: JSONMapping) -> Iterable[bytes]:
        self._head = head_of(chunk, self._asked)
        self._own = str(self._head["id"]).removeprefix("resp_")
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def _delta(self, delta: JSONMapping) -> Iterable[bytes]:
        thought, reasoning = reasoning_of(delta), reasoning_item(self._own, "")
        if thought:
            self._logprobs.skip(thought)
        if thought and reasoning["id"] not in self._ended:
            yield from self._begin(reasoning)
            yield self._of(reasoning["id"], "reasoning_text.delta", content_index=0, delta=thought)
        if text := text_of(delta):
            message = message_item(self._own, [])
            yield from self._end_open("rs_")
            if message["id"] not in self._ended:
                yield from self._begin(message)
                logprobs = self._logprobs.of(text)
                yield self._of(message["id"], "output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        for piece in delta.get("tool_calls") or ():
            yield from self._call_piece(piece)

    def _call_piece(self, piece: JSONMapping) -> Iterable[bytes]:
        """Yield events of a function call by its pieces; a custom tool's input is sent with the whole call."""
        call = self._calls.setdefault(
            piece["index"], {"position": len(self._calls), "id": None, "name": "", "held": []}
        )
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        call["held"].append(function.get("arguments") or "")
        if not (call["id"] and call["name"]):
            return
        item = call_item(
            self._own, call["position"], {"id": call["id"], "function": {"name": call["name"]}}, self._tools
        )
        yield from self._end_open("rs_", "msg_")
        yield from self._begin(item)
        if item["type"] == "function_call":
            if held := "".join(call["held"]):
                yield self._of(item["id"], "function_call_arguments.delta", delta=held)
            call["held"].clear()

    def _begin(self, item: JSONMapping) -> Iterable[bytes]:
        """Yield the events that announce an item, unless they were sent."""
        if item["id"] in self._positions:
            return
        self._positions[item["id"]] = len(self._positions)
        empty = {**item, "status": "in_progress"}
        empty |= {name: type(item[name])() for name in ("content", "arguments", "input") if name in item}
        empty.pop("encrypted_content", None)
        yield self._event("response.output_item.added", output_index=self._positions[item["id"]], item=empty)
        refused = any(part["type"] == "refusal" for part in item.get("content", ())[:1])
        if item["type"] == "message" and not refused:
            yield self._of(item["id"], "content_part.added", content_index=0, part=text_part(""))
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            yield self._of(item["id"], "content_part.added", content_index=0, part=part)

    def _end_open(self, *prefixes: str) -> Iterable[bytes]:
        """Yield the events that end these items, where they are open."""
        open_ids = {f"{prefix}{self._own}" for prefix in prefixes} & self._positions.keys() - self._ended
        if open_ids:
            for item in self._whole()["output"]:
                if item["id"] in open_ids:
                    yield from self._end(item)

    def _end(self, item: JSONMapping) -> Iterable[bytes]:
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
                yield from self._end_parts(item, "output_text.done", logprobs=self._logprobs.given)
        position = self._positions[item["id"]]
        yield self._event("response.output_item.done", output_index=position, item=item)

    def _end_parts(self, item: JSONMapping, name: str, **extra: Any) -> Iterable[bytes]:
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

    def _whole(self) -> JSONObject:
        return from_chat(self._answer.response(), self._asked, logprobs=self._logprobs.given)

    def _event(self, type: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(type, {"type": type, "sequence_number": self._sequence - 1, **data})
