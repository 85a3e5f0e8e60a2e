"""Normalization of answers: fields that some servers omit and strict clients require, filled before capture."""

from __future__ import annotations

from typing import Any

import orjson

from rllm._runtime.ids import new_id
from rllm.gateway.dialects.base import usage_of


def fill_missing_fields(response: dict[str, Any], model: str) -> None:
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
        _fill_choice(choice)


def _fill_choice(choice: dict[str, Any]) -> None:
    message = choice.get("message")
    if message is None:
        message = choice["message"] = {"content": ""}
    if not message.get("role"):
        message["role"] = "assistant"
    ids: set[str] = set()
    for call in message.get("tool_calls") or ():
        _fill_call(call, ids)
    if not choice.get("finish_reason"):
        choice["finish_reason"] = "tool_calls" if message.get("tool_calls") else "stop"


class ChunkNormalizer:
    """`fill_missing_fields` for the chunks of one stream; finish reasons cannot be guessed there."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._calls: dict[int, _Calls] = {}
        """Tool calls begun so far, by choice."""

    def fill_missing_fields(self, chunk: dict[str, Any]) -> None:
        """Fill the fields of the next chunk."""
        if not chunk.get("model"):
            chunk["model"] = self._model
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason") == "":  # Some servers send this until there is one.
                choice["finish_reason"] = None
            # Nearly every choice continues a text, and lacks nothing.
            if choice.get("index") not in self._calls or "tool_calls" in (choice.get("delta") or ()):
                self._fill_choice(choice)

    def _fill_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        if index is None:
            index = choice["index"] = 0
        if index not in self._calls:
            self._calls[index] = _Calls()
            choice["delta"] = {"role": "assistant", **(choice.get("delta") or {})}
        for piece in (choice.get("delta") or {}).get("tool_calls") or ():
            self._calls[index].fill(piece)


class _Calls:
    """Tool calls of one choice: numbered from 0 in order, ids and names sent once, since clients concatenate them."""

    def __init__(self) -> None:
        self._begun: list[tuple[str | None, str | None]] = []
        """Id and name of each, as the upstream sends them."""
        self._ids: set[str] = set()
        """Ids as clients see them."""
        self._places: dict[int, int] = {}
        """Positions by the upstream's number."""

    def fill(self, piece: dict[str, Any]) -> None:
        """Fill a piece; the one that names the function begins a call, and has its id."""
        function = piece.get("function") or {}
        place = piece["index"] = self._place_of(piece, piece.get("id"), function.get("name"))
        if place == len(self._begun):
            self._begun.append((piece.get("id"), function.get("name")))
            _fill_call(piece, self._ids)
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
            place = self._places[number] = num_begun  # Some servers give all calls the same number.
        return place


def _fill_call(call: dict[str, Any], ids: set[str]) -> None:
    """Fill a tool call. Its id must differ from `ids`, those of earlier calls, because results refer to it."""
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
