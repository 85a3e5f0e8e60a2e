"""OpenAI's responses, streamed: chunks of a chat answer to typed events in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rllm.capture import ChatStream
from rllm.gateway.dialects.base import COMMENT, event, reasoning_of
from rllm.gateway.dialects.responses_logprobs import TextLogprobs, entries_of
from rllm.gateway.dialects.responses_output import (
    call_item,
    from_chat,
    head_of,
    message_item,
    reasoning_item,
    text_part,
    wants_logprobs,
)
from rllm.gateway.dialects.responses_tools import Tools
from rllm.gateway.errors import GatewayError
from rllm.types import text_of


class ResponsesStreamEncoder:
    """Items in the order in which they begin; reasoning ends where the message begins, and both where a tool call does.

    Tool calls end with the answer, because a client acts on one as soon as it is done, and the answer is not acknowledged
    before its trace is durable. What an upstream adds to an item that has ended stands in the last event only.
    """

    keep_alive = COMMENT

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._tools = Tools(asked)
        self._answer = ChatStream()
        self._head: dict[str, Any] = {}
        self._own = ""
        self._positions: dict[str, int] = {}
        """Of the items that were begun, by id."""
        self._ended: set[str] = set()
        self._calls: dict[int, dict[str, Any]] = {}
        """Tool calls as far as they have come, by the upstream's index."""
        self._wants_logprobs = wants_logprobs(asked)
        self._logprobs = TextLogprobs()
        self._sequence = 0

    def feed(self, chunks: list[dict[str, Any]]) -> bytes:
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
        told = self._event("error", code=code, message=str(error), param=param)
        failed = {**(self._head or head_of({}, self._asked)), "status": "failed"}
        failed["error"] = {"code": code, "message": str(error)}
        return told + self._event("response.failed", response=failed)

    def _start(self, chunk: Mapping[str, Any]) -> Iterable[bytes]:
        self._head = head_of(chunk, self._asked)
        self._own = str(self._head["id"]).removeprefix("resp_")
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def _delta(self, delta: Mapping[str, Any]) -> Iterable[bytes]:
        thought, reasoning = reasoning_of(delta), reasoning_item(self._own, "")
        if thought:
            self._logprobs.skip(thought)
        if thought and reasoning["id"] not in self._ended:
            yield from self._begin(reasoning)
            yield self._of(reasoning["id"], "reasoning_text.delta", content_index=0, delta=thought)
        if text := text_of(delta):
            message = message_item(self._own, [])
            yield from self._end_spoken("rs_")
            if message["id"] not in self._ended:
                yield from self._begin(message)
                logprobs = self._logprobs.of(text)
                yield self._of(message["id"], "output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        for piece in delta.get("tool_calls") or ():
            yield from self._call_piece(piece)

    def _call_piece(self, piece: Mapping[str, Any]) -> Iterable[bytes]:
        """A function call grows by its pieces; a custom tool's input is known when the whole call is."""
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
        yield from self._end_spoken("rs_", "msg_")
        yield from self._begin(item)
        if item["type"] == "function_call":
            if held := "".join(call["held"]):
                yield self._of(item["id"], "function_call_arguments.delta", delta=held)
            call["held"].clear()

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
            yield self._of(item["id"], "content_part.added", content_index=0, part=text_part(""))
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
                yield from self._end_parts(item, "output_text.done", logprobs=self._logprobs.given)
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
        return from_chat(self._answer.response(), self._asked, logprobs=self._logprobs.given)

    def _event(self, type: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(type, {"type": type, "sequence_number": self._sequence - 1, **data})
