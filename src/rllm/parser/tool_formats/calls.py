"""What the formats share: JSON read as the exact text in which a model wrote it, and calls made of it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

_scan = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\r\n]*")
_surrogate = re.compile("[\ud800-\udfff]")
_beside_arguments = frozenset({"name", "id", "type"})
_object = re.compile(r"\{[ \t\r\n]*[\"}]")


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """A call in the OpenAI format, with an id of its own."""
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}


def call_of_object(text: str) -> dict[str, Any] | None:
    """The call that a JSON object of a name and arguments (or parameters) states; `None` if it states none.

    Arguments may be absent, unless another key may be theirs, misspelt; and they may be an object that the model has quoted
    itself. Half of a surrogate pair, which only an escape can say, is no text that could be sent on.
    """
    spans = object_values(text)
    if spans is None or "name" not in spans:
        return None
    name = json.loads(spans["name"])
    arguments = _arguments_of(spans)
    if not isinstance(name, str) or not name or _surrogate.search(name + arguments) or not is_object(arguments):
        return None
    return new_call(name, arguments)


def _arguments_of(spans: Mapping[str, str]) -> str:
    written = spans.get("arguments", spans.get("parameters"))
    if written is None:
        return "{}" if spans.keys() <= _beside_arguments else ""
    return str(json.loads(written)) if written.startswith('"') else written


def is_object(text: str) -> bool:
    """Whether the text is one JSON object, which is what arguments must be."""
    return object_values(text) is not None


def object_values(text: str) -> dict[str, str] | None:
    """The values of a JSON object, each as the exact text in which it was written; `None` if it is not an object."""
    text = text.strip(" \t\r\n")
    values: dict[str, str] = {}
    try:
        separator, position = "{", 0
        if text[:1] == "{" and text[skip_space(text, 1) :] == "}":
            return values
        while text[position] == separator:
            key, position = _scan(text, skip_space(text, position + 1))
            position = skip_space(text, position)
            if not isinstance(key, str) or text[position] != ":":
                return None
            start = skip_space(text, position + 1)
            _, position = _scan(text, start)
            values[key] = text[start:position]
            separator, position = ",", skip_space(text, position)
    except (ValueError, IndexError, RecursionError):
        return None
    return values if text[position:] == "}" else None


def object_end(text: str, position: int) -> int | None:
    """Where the JSON object that begins here ends, white space around it included; `None` if there is none.

    What stands in its strings, such as a format's own markup, ends nothing.
    """
    start = skip_space(text, position)
    if not _object.match(text, start):  # an error of the decoder takes time for all that stands before it
        return None
    try:
        _, end = _scan(text, start)
    except (ValueError, RecursionError):
        return None
    return skip_space(text, end)


def objects(text: str, position: int, separator: str) -> tuple[list[str], int]:
    """The texts of the JSON objects from here on, with `separator` between them, and where they end; none where one lacks."""
    found: list[str] = []
    while (end := object_end(text, position)) is not None:
        found.append(text[position:end].strip(" \t\r\n"))
        if not text.startswith(separator, end):
            return found, end
        position = end + len(separator)
    return [], position


def all_or_none(calls: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The calls, if there is no malformed one among them."""
    good = [call for call in calls if call is not None]
    return good if len(good) == len(calls) else []


def skip_space(text: str, position: int) -> int:
    """Where the white space of JSON that begins here ends."""
    match = _space.match(text, position)
    return match.end() if match else position
