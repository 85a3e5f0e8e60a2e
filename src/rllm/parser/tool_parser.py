"""The model's text to OpenAI tool calls, without re-serialising what the model wrote."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from rllm.registry import resolve

TOOL_PARSERS = {"hermes": "rllm.parser.tool_parser:HermesToolParser"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """A model's text, taken apart."""

    content: str
    """Everything that is not part of a well-formed call, byte for byte."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In the OpenAI format: `{"id", "type": "function", "function": {"name", "arguments"}}`."""


class ToolParser(Protocol):
    """Finds tool calls in text. It never raises: what is malformed stays content."""

    markers: tuple[str, ...]
    """A call begins with one of these; while text may still become one, it is not shown to a streaming client."""

    def parse(self, text: str) -> ParsedText: ...


def tool_parser(name: str) -> ToolParser:
    """The parser of this short name or `package.module:Class`."""
    parser: ToolParser = resolve(name, TOOL_PARSERS, kind="tool_parser")()
    return parser


class HermesToolParser:
    r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, as Hermes and Qwen models write it.

    The single newline before a call belongs to its markup (chat templates print it), so that an answer rendered again
    gives the same text. A closing tag may be missing at the very end, where the model stopped right after the object.
    """

    markers = ("\n<tool_call>", "<tool_call>")
    _call = re.compile(r"\n?<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> ParsedText:
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        shown = 0
        for match in self._call.finditer(text):
            call = _call_of(match[1])
            if call is not None:
                content.append(text[shown : match.start()])
                shown = match.end()
                calls.append(call)
        content.append(text[shown:])
        return ParsedText(content="".join(content), tool_calls=calls)


def _call_of(text: str) -> dict[str, Any] | None:
    spans = _object_values(text.strip())
    if spans is None or "name" not in spans:
        return None
    name, arguments = json.loads(spans["name"]), spans.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        return None
    if arguments.startswith('"'):  # an object that the model has quoted itself
        arguments = json.loads(arguments)
    elif not arguments.startswith("{"):
        return None
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _object_values(text: str) -> dict[str, str] | None:
    """The values of a JSON object, each as the exact text in which it was written; `None` if it is not an object."""
    scan = json.JSONDecoder().raw_decode
    space = re.compile(r"[ \t\r\n]*")

    def skip(position: int) -> int:
        match = space.match(text, position)
        return match.end() if match else position

    values: dict[str, str] = {}
    try:
        separator, position = "{", 0
        while text[position] == separator:
            key, position = scan(text, skip(position + 1))
            position = skip(position)
            if not isinstance(key, str) or text[position] != ":":
                return None
            start = skip(position + 1)
            _, position = scan(text, start)
            values[key] = text[start:position]
            separator, position = ",", skip(position)
    except (ValueError, IndexError, RecursionError):
        return None
    return values if text[position:] == "}" else None
