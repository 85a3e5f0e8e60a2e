"""Calls as Hermes and Qwen models write them: a JSON object between `<tool_call>` tags."""

from __future__ import annotations

import re
from typing import Any

from rllm.parser.tool_formats.calls import call_of_object, object_end
from rllm.parser.tool_parser import ParsedText, ToolFormat


class HermesToolParser(ToolFormat):
    r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`.

    The single newline before a call belongs to its markup (chat templates print it), so that an answer rendered again
    gives the same text. A closing tag may be missing at the very end, where the model stopped right after the object.
    """

    markers = ("\n<tool_call>", "<tool_call>")
    markup = ("<tool_call>", "</tool_call>")
    foreign_marks = ("<function=", "<arg_key>")  # of Qwen3-Coder and of GLM, which write no JSON between these tags
    example = '<tool_call>\n{"name": "NAME", "arguments": {ARGUMENTS}}\n</tool_call>'
    _open = re.compile(r"\n?<tool_call>")
    _close = "</tool_call>"

    def parse(self, text: str) -> ParsedText:
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        shown = position = 0
        while opened := self._open.search(text, position):
            call, position = self._call(text, opened.end())
            if call is not None:
                content.append(text[shown : opened.start()])
                shown = position
                calls.append(call)
        content.append(text[shown:])
        return ParsedText(content="".join(content), tool_calls=calls)

    def _call(self, text: str, start: int) -> tuple[dict[str, Any] | None, int]:
        """Return the call whose object begins here, if it is one, and its end, or else the next closing tag."""
        end = object_end(text, start)
        if end is not None and (end == len(text) or text.startswith(self._close, end)):
            return call_of_object(text[start:end]), end + len(self._close)
        closed = text.find(self._close, start)
        return None, len(text) if closed < 0 else closed + len(self._close)
