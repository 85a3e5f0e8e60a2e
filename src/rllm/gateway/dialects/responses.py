"""OpenAI's responses: the dialect, and chat answers as output items and typed events.

`responses_input.py` translates requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from rllm.gateway.dialects.base import (
    COMMENT,
    Dialect,
    answer_json,
    created_at,
    event,
    first_choice,
    reasoning_of,
    token_fields,
    usage_of,
    wire_format,
)
from rllm.gateway.dialects.responses_input import (
    INSTRUCTIONS_KEY,
    RESPONSES,
    message_item,
    output_items,
    reasoning_item,
    refers_to,
    text_part,
    to_chat,
)
from rllm.gateway.errors import GatewayError
from rllm.types import JSONMapping, JSONObject, Trace, text_of

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "max_output_tokens"}
"""Reason of an incomplete answer, by finish reason."""
_REPEATED: JSONObject = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}
"""Fields of a request that its response repeats, and their defaults."""


class ResponsesDialect(Dialect):
    """OpenAI's `/v1/responses`."""

    wire = wire_format("responses")
    parameters = RESPONSES
    id_prefix = "resp_"
    needs = "'model' and 'input'"
    prompt_name = "input"
    continues_answers = True

    def refers_to(self, asked: JSONMapping) -> Sequence[str]:
        return refers_to(asked)

    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        return to_chat(asked, earlier)

    def trace_metadata(self, asked: JSONMapping) -> JSONMapping:
        return {INSTRUCTIONS_KEY: True} if asked.get("instructions") else {}

    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        return answer_json(from_chat(response, asked))

    def encoder(self, *, asked: JSONMapping) -> ResponsesStreamEncoder:
        return ResponsesStreamEncoder(asked)

    def render_count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": num_tokens})


# --- answers ----------------------------------------------------------------------------------------------------------


def from_chat(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return the response of a chat completion's first choice; it repeats fields of its request, as clients expect."""
    choice = first_choice(response)
    reason = _INCOMPLETE.get(choice.get("finish_reason") or "stop")
    items = output_items(choice.get("message") or {}, str(response.get("id")), asked)
    if reason:
        items = _cut_off(items)
    usage = usage_of(response)
    return {
        **head_of(response, asked),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "completed_at": None if reason else int(time.time()),
        "output": items,
        "usage": {
            "input_tokens": usage["prompt"],
            "input_tokens_details": {"cached_tokens": usage["cached"], "cache_write_tokens": 0},
            "output_tokens": usage["completion"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning"]},
            "total_tokens": usage["prompt"] + usage["completion"],
        },
        **token_fields(response, asked),
    }


def _cut_off(items: list[JSONObject]) -> list[JSONObject]:
    """Return the items of an incomplete answer: without an empty message, which clients would parse."""
    *before, last = items
    if before and last.get("content") == [text_part("")]:
        return _cut_off(before)
    return [*before, {**last, "status": "incomplete"}]


def head_of(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return all fields except the answer itself."""
    repeated = {name: asked.get(name, default) for name, default in _REPEATED.items()}
    reasoning = asked.get("reasoning") or {}
    return repeated | {
        "id": response.get("id"),
        "object": "response",
        "created_at": created_at(response),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": response.get("model") or asked.get("model") or "",
        "output": [],
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "text": {"format": {"type": "text"}, **(asked.get("text") or {})},
        "tool_choice": asked.get("tool_choice") or "auto",
        "truncation": asked.get("truncation") or "disabled",
        "usage": None,
    }


# --- streams ----------------------------------------------------------------------------------------------------------


class ResponsesStreamEncoder:
    """Encoder that sends reasoning and text as they come, and all that clients act on, such as tool calls, at the end.

    An answer is not acknowledged before its trace is durable. Reasoning ends where the text begins; what an upstream
    adds to it later is in the last event only.
    """

    keep_alive = COMMENT

    def __init__(self, asked: JSONMapping) -> None:
        self._asked = asked
        self._thought = ""
        self._head: JSONObject = {}
        self._positions: dict[str, int] = {}
        """Positions of the items begun so far, by id."""
        self._ended: set[str] = set()
        self._sequence = 0

    def feed(self, chunks: list[JSONObject]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            if not self._head:
                self._head = head_of(chunk, self._asked)
                events.append(self._event("response.created", response=self._head))
                events.append(self._event("response.in_progress", response=self._head))
            for choice in chunk.get("choices") or ():
                if choice.get("index", 0) == 0:
                    events += self._delta(choice.get("delta") or {})
        return b"".join(events)

    def finish(self, response: JSONMapping) -> bytes:
        shown = {**from_chat(response, self._asked), "created_at": self._head["created_at"]}
        items = {item["id"]: item for item in shown["output"]}
        events: list[bytes] = []
        for item_id, item in items.items():  # clients expect that an item ends before the next one begins
            events += self._begin(item)
            events += self._end(item) if item_id not in self._ended else ()
        order = sorted(items, key=self._positions.__getitem__)
        shown["output"] = [items[item_id] for item_id in order]
        return b"".join([*events, self._event(f"response.{shown['status']}", response=shown)])

    def fail(self, error: GatewayError) -> bytes:
        code, param = str(error.code or "server_error"), error.to_dict(prompt="input")["error"]["param"]
        error_event = self._event("error", code=code, message=str(error), param=param)
        failed = {**(self._head or head_of({}, self._asked)), "status": "failed"}
        failed["error"] = {"code": code, "message": str(error)}
        return error_event + self._event("response.failed", response=failed)

    def _delta(self, delta: JSONMapping) -> Iterable[bytes]:
        own = str(self._head["id"]).removeprefix("resp_")
        thought, text = reasoning_of(delta), text_of(delta)
        self._thought += thought
        reasoning, message = reasoning_item(own, ""), message_item(own, [text_part("")])
        if thought and reasoning["id"] not in self._ended:
            yield from self._begin(reasoning)
            yield self._of(reasoning["id"], "reasoning_text.delta", content_index=0, delta=thought)
        if text:
            if reasoning["id"] in self._positions.keys() - self._ended:
                yield from self._end(reasoning_item(own, self._thought))
            yield from self._begin(message)
            yield self._of(message["id"], "output_text.delta", content_index=0, delta=text, logprobs=[])

    def _begin(self, item: JSONMapping) -> Iterable[bytes]:
        """Yield the events that announce an item, unless they were sent."""
        if item["id"] in self._positions:
            return
        self._positions[item["id"]] = len(self._positions)
        empty = {**item, "status": "in_progress"}
        empty |= {name: type(item[name])() for name in ("content", "arguments", "input") if name in item}
        empty.pop("encrypted_content", None)
        yield self._event("response.output_item.added", output_index=self._positions[item["id"]], item=empty)
        for part in item.get("content", ())[:1]:
            if part["type"] != "refusal":
                yield self._of(item["id"], "content_part.added", content_index=0, part={**part, "text": ""})

    def _end(self, item: JSONMapping) -> Iterable[bytes]:
        self._ended.add(item["id"])
        match item["type"]:
            case "function_call":
                yield self._of(item["id"], "function_call_arguments.delta", delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._of(item["id"], "function_call_arguments.done", **done)
            case "custom_tool_call":
                yield self._of(item["id"], "custom_tool_call_input.delta", delta=item["input"])
                yield self._of(item["id"], "custom_tool_call_input.done", input=item["input"])
        for index, part in enumerate(item.get("content", ())):
            at = {"content_index": index}
            if part["type"] == "refusal":
                yield self._of(item["id"], "content_part.added", **at, part={**part, "refusal": ""})
                yield self._of(item["id"], "refusal.delta", **at, delta=part["refusal"])
                yield self._of(item["id"], "refusal.done", **at, refusal=part["refusal"])
            else:
                extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield self._of(item["id"], f"{part['type']}.done", **at, text=part["text"], **extra)
            yield self._of(item["id"], "content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=self._positions[item["id"]], item=item)

    def _of(self, item_id: str, event_name: str, **data: Any) -> bytes:
        position = self._positions[item_id]
        return self._event(f"response.{event_name}", item_id=item_id, output_index=position, **data)

    def _event(self, type: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(type, {"type": type, "sequence_number": self._sequence - 1, **data})
