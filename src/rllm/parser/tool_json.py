"""Arguments of tool calls, read as the exact text that a model wrote, and calls built from them.

They are JSON, or literals of Python or Gemma, which are converted to JSON.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rllm.types import JSONMapping, JSONObject

Schemas: TypeAlias = Mapping[str, JSONMapping]
"""JSON schema of the parameters of each tool."""

_scan = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\r\n]*")
_values = msgspec.json.Decoder(dict[str, msgspec.Raw])
_beside_arguments = frozenset({"name", "id", "type", "tool_name", "tool_call_id"})
_object = re.compile(r"\{[ \t\r\n]*[\"}]")


def new_call(name: str, arguments: str) -> JSONObject:
    """Return a call in the OpenAI format, with a new id."""
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}


def call_of_object(text: str, name_key: str = "name") -> JSONObject | None:
    """Return the call in a JSON object of a name and arguments (or parameters); `None` if it is not one.

    Arguments may be absent, unless another key looks like a misspelling of theirs; and they may be an object that the
    model has quoted. Half of a surrogate pair, which only an escape can express, is not valid text.
    """
    spans = object_values(text)
    if spans is None or name_key not in spans:
        return None
    name = json.loads(spans[name_key])
    arguments = spans.get("arguments", spans.get("parameters"))
    if arguments is None:
        arguments = "{}" if spans.keys() <= _beside_arguments else ""
    elif arguments.startswith('"'):
        arguments = str(json.loads(arguments))
    if not isinstance(name, str) or not name or not is_object(arguments):
        return None
    return new_call(name, arguments)


def call_with_arguments(text: str) -> JSONObject | None:
    """Return the call in a JSON object, which must have arguments: an answer may be an object with a name, too."""
    return call_of_object(text) if {"parameters", "arguments"} & set(object_values(text) or ()) else None


def call_of_pair(text: str) -> JSONObject | None:
    """Return the call in a JSON object that has only a name with its arguments; `None` if it is not one."""
    spans = object_values(text) or {}
    [*names] = spans
    return new_call(names[0], spans[names[0]]) if len(names) == 1 and is_object(spans[names[0]]) else None


def is_object(text: str) -> bool:
    """Return whether the text is one JSON object, as arguments must be."""
    return object_values(text) is not None


def object_values(text: str) -> dict[str, str] | None:
    """Return the values of a JSON object, each as its exact source text; `None` if it is not an object."""
    try:
        return {key: bytes(value).decode() for key, value in _values.decode(text).items()}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def object_end(text: str, position: int) -> int | None:
    """Return the end of the JSON object that begins here, white space included; `None` if there is none.

    Markup of a format inside its strings ends nothing.
    """
    start = skip_space(text, position)
    if not _object.match(text, start):  # an error of the decoder takes time for all that stands before it
        return None
    try:
        _, end = _scan(text, start)
    except (ValueError, RecursionError):
        return None
    return skip_space(text, end)


def skip_space(text: str, position: int) -> int:
    """Return the end of the JSON white space that begins here."""
    match = _space.match(text, position)
    return match.end() if match else position


_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""JSON constants by their lower-case spelling in JSON or Python."""
_TYPES = {bool: "boolean", int: "number", float: "number", type(None): "null", str: "string", dict: "object"}
_MAX_PARTS = 100
"""Parts of one argument's schema that are searched for allowed types."""


def schemas_of(tools: Sequence[JSONMapping]) -> Schemas:
    """Return the JSON schema of each tool's parameters; the tools are in the OpenAI format."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    described = [item for item in functions if isinstance(item, Mapping)]
    return {
        str(item.get("name")): item["parameters"] for item in described if isinstance(item.get("parameters"), Mapping)
    }


def arguments_json(written: Mapping[str, str], schema: JSONMapping) -> str:
    """Return the arguments as one JSON object; `schema` describes all parameters."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    items = (f"{_quoted(key)}: {_value_json(text, known.get(key), schema)}" for key, text in written.items())
    return f"{{{', '.join(items)}}}"


def _value_json(text: str, schema: object, root: JSONMapping) -> str:
    """Return a value as JSON: the text itself if it is JSON of a type that the schema allows, else as a string.

    `root` resolves the schema's references. A value without a type in its schema is a string; a fraction instead of an
    integer stays a number, and the tool reports the error.
    """
    types = {"number" if name == "integer" else name for name in _types(schema, root, set())}
    bare = text.strip()
    bare = _WORDS.get(bare.lower(), bare)
    bare = bare if is_object(f'{{"": {bare}}}') else python_json(bare) or bare
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _quoted(text)
    # A string is written bare, so quotes are part of it.
    return bare if not isinstance(value, str) and _TYPES.get(type(value), "array") in types else _quoted(text)


def _types(schema: object, root: JSONMapping, seen: set[int]) -> Iterator[str]:
    """Return the types that a schema allows, as far as it names them.

    `seen` has the ids of the parts already searched: references may be circular, and may double at each level.
    """
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > _MAX_PARTS:
        return
    seen.add(id(schema))
    named = schema.get("type")
    yield from (name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
    for value in [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield _TYPES.get(type(value), "array")
    for kind in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema.get(kind)):
            yield from _types(option, root, seen)
    if isinstance(reference := schema.get("$ref"), str):  # such as #/$defs/Name
        place: object = root
        for key in reference.removeprefix("#/").split("/"):
            place = place.get(key) if isinstance(place, Mapping) else None
        yield from _types(place, root, seen)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_WORD = re.compile(r"[^\s\"'<>{}\[\](),:=]+")
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}


def _unescaped(match: re.Match[str]) -> str:
    body = match[1]
    return chr(int(body[1:], 16)) if len(body) > 1 else _ESCAPES.get(body, match[0])


def _of_python(match: re.Match[str]) -> str:
    text = _ESCAPE.sub(_unescaped, match[0][1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON escapes characters as two halves


@dataclass(frozen=True, slots=True)
class _Syntax:
    """Differences of a syntax from JSON's."""

    string: re.Pattern[str]
    text_of: Callable[[re.Match[str]], str]
    assign: str
    """Sign between a key and its value, where the key is a bare word."""


_QUOTED = r"'[^'\\]*(?:\\.[^'\\]*)*'"
_PYTHON = _Syntax(re.compile(_QUOTED + "|" + _QUOTED.replace("'", '"'), re.DOTALL), _of_python, "=")
_GEMMA = _Syntax(re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL), lambda match: match[1], ":")
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def python_arguments(text: str, position: int) -> tuple[str, int] | None:
    """Return the keyword arguments after an opening bracket as a JSON object, and the end of the call."""
    return _object_until(text, position, ")", _PYTHON)


def gemma_object(text: str, position: int) -> tuple[str, int] | None:
    """Return the object in Gemma's syntax that begins here as JSON, and its end."""
    return _object_until(text, position + 1, "}", _GEMMA)


def _object_until(text: str, position: int, closing: str, syntax: _Syntax) -> tuple[str, int] | None:
    """Return the keys and values before a closing bracket as a JSON object, and the place after the bracket."""
    found = _json_until(text, position, closing, syntax)
    return (f"{{{found[0]}}}", found[1]) if found and is_object(f"{{{found[0]}}}") else None


def python_json(text: str) -> str | None:
    """Return a list or dictionary in Python's syntax as JSON; `None` if it is not one."""
    if text[:1] not in ("[", "{"):
        return None
    found = _json_until(text, 1, _CLOSING[text[0]], _PYTHON)
    written = f"{text[0]}{found[0]}{_CLOSING[text[0]]}" if found and found[1] == len(text) else ""
    return written if is_object(f'{{"": {written}}}') else None


def _json_until(text: str, position: int, closing: str, syntax: _Syntax) -> tuple[str, int] | None:
    """Return the text before a closing bracket with its literals as JSON, and the place after the bracket."""
    written, closings = list[str](), [closing]
    while True:
        position = end_of_space(text, position)
        sign = text[position : position + 1]
        if string := syntax.string.match(text, position):
            written.append(json.dumps(syntax.text_of(string), ensure_ascii=False))
            position = string.end()
        elif word := _WORD.match(text, position):
            position = end_of_space(text, word.end())
            is_key = text[position : position + 1] == syntax.assign
            literal = json.dumps(word[0], ensure_ascii=False) + ": " if is_key else _literal(word[0])
            if literal is None:
                return None
            written.append(literal)
            position += is_key
        elif sign == closings[-1]:
            position += 1
            closings.pop()
            if not closings:
                return "".join(written), position
            written.append("]" if sign == ")" else sign)
        elif sign in ("{", "[", "(", ",", ":"):
            position += 1
            closings += [_CLOSING[sign]] if sign in _CLOSING else []
            written.append("[" if sign == "(" else f"{sign} " if sign in ",:" else sign)
        else:
            return None


def end_of_space(text: str, position: int, limit: int = sys.maxsize) -> int:
    """Return the position after white space of any kind."""
    space = _SPACE.match(text, position, limit)
    return space.end() if space else position


def _literal(word: str) -> str | None:
    """Return a number or constant as JSON; `None` if the word is neither."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    return word if is_object(f'{{"": {word}}}') else None
