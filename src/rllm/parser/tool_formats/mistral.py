"""Calls as Mistral models write them, after `[TOOL_CALLS]`: a JSON array, or a name and its arguments."""

from __future__ import annotations

import re
from typing import Any

from rllm.parser.tool_formats.calls import (
    all_or_none,
    call_of_object,
    is_object,
    new_call,
    object_end,
    objects,
    skip_space,
)
from rllm.parser.tool_parser import ParsedText, ToolFormat

_TAG, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralToolParser(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each.

    What follows a tag is either calls from end to end or content.
    """

    markers = (_TAG,)
    markup = (_TAG, _CALL_ID, _ARGS)
    example = '[TOOL_CALLS][{"name": "NAME", "arguments": {ARGUMENTS}}]'
    _named = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\{))")

    def parse(self, text: str) -> ParsedText:
        position = _next_tag(text, 0)
        content, calls = [text[:position]], list[dict[str, Any]]()
        while position < len(text):
            start = position + len(_TAG)
            found, end = self._calls(text, start)
            if end is None or not (end == len(text) or text.startswith(_TAG, end)):
                found, end = [], _next_tag(text, start)
            calls += found
            if not found:
                content.append(text[position:end])
            position = end
        return ParsedText(content="".join(content), tool_calls=calls)

    def _calls(self, text: str, start: int) -> tuple[list[dict[str, Any]], int | None]:
        """Return the calls that begin here, if they are well-formed, and their end."""
        named = self._named.match(text, start)
        if named:
            end = object_end(text, named.end())
            arguments = text[named.end() : end].strip()
            return ([new_call(named[1], arguments)] if is_object(arguments) else []), end
        start = skip_space(text, start)
        items, end = objects(text, start + 1, ",")
        if not text.startswith("[", start) or not text.startswith("]", end):
            return [], None
        return all_or_none([call_of_object(item) for item in items]), skip_space(text, end + 1)


def _next_tag(text: str, position: int) -> int:
    tag = text.find(_TAG, position)
    return len(text) if tag < 0 else tag
