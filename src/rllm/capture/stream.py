"""Reassembly of streams: server-sent events from bytes, and chat completions from their chunks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from rllm.errors import TokenMismatchError
from rllm.types import JSONMapping, JSONObject

_MAX_CHOICES, _MAX_TOOL_CALLS = 1_024, 10_000
"""Limits for one answer: a server may send any number as the index of the next piece."""


def split_lines(text: bytes) -> list[bytes] | None:
    """Return the payloads of whole events in the common form, or `None` if any event has another form.

    In the common form each event is a line `data: ...` and an empty line (missing after the last one), ending with LF.
    """
    if not text.startswith(b"data: "):
        return None
    payloads = text[6:].split(b"\n\ndata: ")
    # A search is several times as fast as a count.
    return None if b"\n" in b"".join(payloads) else payloads


class SSEDecoder:
    """Decoder of server-sent events, as the HTML standard defines them, from bytes that may be split anywhere.

    Only `data` matters here: comments and other fields are skipped, and an event that the connection cut off is not
    reported.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._later: list[bytes] = []
        """Bytes after the rest, until a line ends."""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, received: bytes) -> list[bytes]:
        """Return the payloads of the events that these bytes complete."""
        if self._after_cr and received.startswith(b"\n"):
            received = received[1:]  # the second half of a CRLF that was cut in two
            self._after_cr = False
        if not received:
            return []
        if self._rest and b"\n" not in received and b"\r" not in received:
            self._later.append(received)
            return []
        text = b"".join([self._rest, *self._later, received]) if self._later else self._rest + received
        self._later.clear()
        end = -1 if self._data else text.rfind(b"\n\n")
        if end >= 0 and b"\r" not in text and (plain := split_lines(text[:end])) is not None:
            self._rest = text[end + 2 :]
            return plain
        lines = text.splitlines(keepends=True)
        self._after_cr = received.endswith(b"\r")
        self._rest = b"" if received.endswith((b"\r", b"\n")) else lines.pop()
        payloads: list[bytes] = []
        for line in lines:
            field, _, value = line.rstrip(b"\r\n").partition(b":")
            if field in _DATA:
                self._data.append(value.removeprefix(b" "))
            elif line in _LINE_ENDS and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads


_DATA = (b"data", b"\xef\xbb\xbfdata")
"""With and without the byte order mark that a stream may begin with."""
_LINE_ENDS = (b"\n", b"\r\n", b"\r")


class ChatStream:
    """Rebuilds a chat completion from its chunks, so that streamed and unstreamed calls give equal traces."""

    def __init__(self) -> None:
        self._head: JSONObject = {}
        self._choices: dict[int, _ChoiceStream] = {}

    def feed(self, chunk: JSONMapping) -> None:
        """Take one parsed `chat.completion.chunk`.

        Raises:
            TokenMismatchError: if a choice continues after its end.
        """
        for name, value in chunk.items():
            if name == "choices":
                for choice in value or ():
                    index = choice.get("index", 0)
                    if index not in self._choices:
                        if len(self._choices) >= _MAX_CHOICES:
                            raise TokenMismatchError(f"the answer has more than {_MAX_CHOICES} choices")
                        self._choices[index] = _ChoiceStream(index)
                    self._choices[index].feed(choice)
            elif value is not None:
                self._head[name] = value

    @property
    def finished(self) -> bool:
        """True if every choice that began has its finish reason."""
        return bool(self._choices) and all("finish_reason" in choice.fields for choice in self._choices.values())

    def response(self) -> JSONObject:
        """Return the completion so far; a choice that was cut off has the finish reason `abort`."""
        choices = [choice.whole() for _, choice in sorted(self._choices.items())]
        return {**self._head, "object": "chat.completion", "choices": choices}


class _ChoiceStream:
    """One choice of a stream."""

    def __init__(self, index: int) -> None:
        self.fields: JSONObject = {"index": index}
        self.role = "assistant"
        self.texts: dict[str, list[str]] = {}
        self.extras: JSONObject = {}
        self.tool_calls: list[JSONObject] = []
        self.numbered: dict[int | None, JSONObject] = {}
        """Latest tool call by the index that the server gave it; `None` if it gave none."""
        self.logprobs: dict[str, list[Any]] | None = None
        """Lists of each field, as they arrived."""
        self.token_ids: list[Any] | None = None
        """Lists of ids, as they arrived."""

    def feed(self, choice: JSONMapping) -> None:
        is_over = "finish_reason" in self.fields and self.token_ids is not None
        if is_over and (choice.get("finish_reason") or choice.get("token_ids")):
            # It would be another answer's, under the same index.
            raise TokenMismatchError(
                f"choices[{self.fields['index']}] continues after its end: several answers have the same index"
            )
        for name, value in choice.items():
            if value is None or (name == "finish_reason" and not value):  # some servers send "" until there is one
                continue
            if name == "delta":
                self._feed_delta(value)
            elif name == "token_ids":
                self.token_ids = self.token_ids or []
                self.token_ids.append(value)
            elif name == "logprobs":
                self.logprobs = self.logprobs or {}
                for field, entries in value.items():
                    if isinstance(entries, list):
                        self.logprobs.setdefault(field, []).append(entries)
            elif name != "index":
                self.fields[name] = value

    def _feed_delta(self, delta: JSONMapping) -> None:
        for name, value in delta.items():
            if name == "role":
                self.role = value or self.role
            elif isinstance(value, str):
                self.texts.setdefault(name, []).append(value)
            elif name == "tool_calls":
                for call in value or ():
                    _merge(self._tool_call(call), call)
            elif value is not None:
                self.extras[name] = value

    def _tool_call(self, piece: JSONMapping) -> JSONObject:
        """Return the tool call that a piece belongs to.

        Some servers give their calls no index, or all the same one, and begin each with its id and name.
        """
        number, call_id, name = piece.get("index"), piece.get("id"), (piece.get("function") or {}).get("name")
        known = self.numbered.get(number)
        if number is None:
            begins = bool(call_id or name)
        else:
            begins = bool(call_id and name) and known is not None and known.get("id") not in (None, call_id)
        if known is None or begins:
            if len(self.tool_calls) >= _MAX_TOOL_CALLS:
                raise TokenMismatchError(f"an answer has more than {_MAX_TOOL_CALLS:,} tool calls")
            known = self.numbered[number] = {}
            self.tool_calls.append(known)
        return known

    def whole(self) -> JSONObject:
        texts = {name: "".join(pieces) for name, pieces in self.texts.items()}
        message = {"role": self.role, "content": "", **texts, **self.extras}
        if self.tool_calls:
            message["tool_calls"] = [_joined(call) for call in self.tool_calls]
        if not message["content"] and any(value for name, value in message.items() if name != "role"):
            # As in an unstreamed answer that consists of a tool call, reasoning or a refusal.
            message["content"] = None
        logprobs = self.logprobs and {name: list(chain.from_iterable(pieces)) for name, pieces in self.logprobs.items()}
        choice = {"finish_reason": "abort", "logprobs": logprobs, **self.fields, "message": message}
        if self.token_ids is not None:
            choice["token_ids"] = list(chain.from_iterable(self.token_ids))
        return choice


_GROWING = ("arguments", "input")
"""Texts of a tool call that arrive in pieces; id and name arrive whole, and some servers repeat them."""


class _Pieces(list[str]):
    """A growing text: appending to a string each time would copy all of it."""


def _joined(call: JSONMapping) -> JSONObject:
    """Return a tool call with the pieces of its texts joined."""
    return {
        name: "".join(value) if isinstance(value, _Pieces) else _joined(value) if isinstance(value, Mapping) else value
        for name, value in call.items()
    }


def _merge(call: JSONObject, piece: JSONMapping) -> None:
    for name, value in piece.items():
        if isinstance(value, Mapping) and name not in _GROWING:  # arguments that are an object arrive whole
            _merge(call.setdefault(name, {}), value)
        elif name in _GROWING and isinstance(value, str):
            pieces = call.get(name)
            if not isinstance(pieces, _Pieces):
                pieces = call[name] = _Pieces()
            pieces.append(value)
        elif name != "index" and value is not None:
            call[name] = value
