"""Complete what a sloppy server leaves out of an answer and strict clients insist on, before it is captured or shown."""

from __future__ import annotations

from typing import Any

import orjson

from rllm._runtime.ids import new_id
from rllm.gateway.dialects.base import usage_of


def complete_response(response: dict[str, Any], model: str) -> None:
    """Give a chat completion its model and usage, and each choice index, role, finish reason and callable tool calls."""
    if not response.get("model"):
        response["model"] = model
    if not response.get("usage"):
        usage = usage_of(response)
        read, written = usage["prompt"], usage["completion"]
        response["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choices = response.get("choices") or ()
    if len({choice.get("index") for choice in choices} - {None}) < len(choices):
        for position, choice in enumerate(choices):
            choice["index"] = position
    for choice in choices:
        _complete_choice(choice)


def _complete_choice(choice: dict[str, Any]) -> None:
    message = choice.get("message")
    if message is None:
        message = choice["message"] = {"content": ""}
    if not message.get("role"):
        message["role"] = "assistant"
    ids: set[str] = set()
    for call in message.get("tool_calls") or ():
        _complete_call(call, ids)
    if not choice.get("finish_reason"):
        choice["finish_reason"] = "tool_calls" if message.get("tool_calls") else "stop"


class ChunkCompleter:
    """The same for the chunks of one stream, whose finish reasons nobody can guess."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._calls: dict[int, _Calls] = {}
        """The tool calls that each choice has begun."""

    def complete(self, chunk: dict[str, Any]) -> None:
        """Complete the next chunk."""
        if not chunk.get("model"):
            chunk["model"] = self._model
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason") == "":  # which some servers say until there is one
                choice["finish_reason"] = None
            # Nearly every choice goes on with a text, and has nothing to complete.
            if choice.get("index") not in self._calls or "tool_calls" in (choice.get("delta") or ()):
                self._complete_choice(choice)

    def _complete_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        if index is None:
            index = choice["index"] = 0
        if index not in self._calls:
            self._calls[index] = _Calls()
            choice["delta"] = {"role": "assistant", **(choice.get("delta") or {})}
        for piece in (choice.get("delta") or {}).get("tool_calls") or ():
            self._calls[index].complete(piece)


class _Calls:
    """The tool calls of one choice: numbered from 0 on as they come, their ids and names told once, as clients add them up."""

    def __init__(self) -> None:
        self._begun: list[tuple[str | None, str | None]] = []
        """Id and name of each, as the upstream gives them."""
        self._ids: set[str] = set()
        """As they are told."""
        self._places: dict[int, int] = {}
        """By the upstream's number."""

    def complete(self, piece: dict[str, Any]) -> None:
        """The piece that names the function begins a call, and is the one with its id."""
        function = piece.get("function") or {}
        place = piece["index"] = self._place_of(piece, piece.get("id"), function.get("name"))
        if place == len(self._begun):
            self._begun.append((piece.get("id"), function.get("name")))
            _complete_call(piece, self._ids)
            return
        call_id, name = self._begun[place]
        if call_id and piece.get("id") == call_id:
            del piece["id"]
        if name and function.get("name") == name:
            del function["name"]

    def _place_of(self, piece: dict[str, Any], call_id: str | None, name: str | None) -> int:
        num_begun = len(self._begun)
        number = piece.get("index")
        if number is None:
            return num_begun if call_id or name else max(num_begun - 1, 0)
        place = self._places.setdefault(number, num_begun)
        if place < num_begun and call_id and name and self._begun[place][0] not in (None, call_id):
            place = self._places[number] = num_begun  # some servers give all calls the same number
        return place


def _complete_call(call: dict[str, Any], ids: set[str]) -> None:
    """`ids` are those of the answer's calls before it, to which its own is added: results find their calls by them."""
    if not call.get("id") or call["id"] in ids:
        call["id"] = f"call_{new_id()}"
    ids.add(call["id"])
    if not call.get("type"):
        call["type"] = "function"
    function = call.get("function") or {}
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = orjson.dumps(function["arguments"]).decode()
    elif function.get("name") and function.get("arguments") is None:
        function["arguments"] = ""
