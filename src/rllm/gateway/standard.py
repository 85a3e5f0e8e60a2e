"""Complete what a sloppy server leaves out of an answer and strict clients insist on, before it is captured or shown."""

from __future__ import annotations

from typing import Any

import orjson

from rllm.gateway.dialects.base import usage_of
from rllm.ids import new_id


def complete_response(response: dict[str, Any], model: str) -> None:
    """Give a chat completion its model and usage, and each choice index, role, finish reason and callable tool calls."""
    if not response.get("model"):
        response["model"] = model
    if not response.get("usage"):
        usage = usage_of(response)
        read, written = usage["prompt"], usage["completion"]
        response["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    for position, choice in enumerate(response.get("choices") or ()):
        _complete_choice(choice, position)


def _complete_choice(choice: dict[str, Any], position: int) -> None:
    if choice.get("index") is None:
        choice["index"] = position
    message = choice.get("message")
    if message is None:
        message = choice["message"] = {"content": ""}
    if not message.get("role"):
        message["role"] = "assistant"
    for call in message.get("tool_calls") or ():
        _complete_call(call)
    if not choice.get("finish_reason"):
        choice["finish_reason"] = "tool_calls" if message.get("tool_calls") else "stop"


class ChunkCompleter:
    """The same for the chunks of one stream, whose finish reasons nobody can guess."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._num_calls: dict[int, int] = {}
        """How many tool calls each choice has begun."""

    def complete(self, chunk: dict[str, Any]) -> None:
        """Complete the next chunk."""
        if not chunk.get("model"):
            chunk["model"] = self._model
        for choice in chunk.get("choices") or ():
            # Nearly every choice goes on with a text, and has nothing to complete.
            if choice.get("index") not in self._num_calls or "tool_calls" in (choice.get("delta") or ()):
                self._complete_choice(choice)

    def _complete_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        if index is None:
            index = choice["index"] = 0
        if index not in self._num_calls:
            self._num_calls[index] = 0
            choice["delta"] = {"role": "assistant", **(choice.get("delta") or {})}
        for piece in (choice.get("delta") or {}).get("tool_calls") or ():
            self._complete_piece(piece, index)

    def _complete_piece(self, piece: dict[str, Any], choice_index: int) -> None:
        """The piece that names the function begins a call, and is the one with its id."""
        begins = bool((piece.get("function") or {}).get("name")) or bool(piece.get("id"))
        if piece.get("index") is None:
            piece["index"] = max(self._num_calls[choice_index] - (not begins), 0)
        if piece["index"] >= self._num_calls[choice_index]:
            self._num_calls[choice_index] = piece["index"] + 1
            _complete_call(piece)


def _complete_call(call: dict[str, Any]) -> None:
    if not call.get("id"):
        call["id"] = f"call_{new_id()}"
    if not call.get("type"):
        call["type"] = "function"
    function = call.get("function") or {}
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = orjson.dumps(function["arguments"]).decode()
