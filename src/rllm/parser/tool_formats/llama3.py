"""Calls as Llama 3 models write them: JSON objects that are the whole answer, or that follow `<|python_tag|>`."""

from __future__ import annotations

from typing import Any

from rllm.parser.tool_formats.calls import all_or_none, call_of_object, object_values, objects
from rllm.parser.tool_parser import ParsedText, ToolFormat

_TAG = "<|python_tag|>"


class Llama3JsonToolParser(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, several of them with `;` between them.

    An answer that happens to be a JSON object is a call only if it has a name and parameters. What follows a tag is
    either calls from end to end or content: half of it is never run.
    """

    markers = (_TAG,)
    opening_markers = ("{",)
    markup = (_TAG,)
    template_marks = (_TAG, "<|start_header_id|>ipython")  # without built-in tools a template prints no tag
    example = '{"name": "NAME", "parameters": {ARGUMENTS}}'

    def parse(self, text: str) -> ParsedText:
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        position, tag = 0, ""
        while True:
            found, end = _calls(text, position)
            calls += found
            if not found:
                content.append(tag + text[position:end])
            if end == len(text):
                return ParsedText(content="".join(content), tool_calls=calls)
            position, tag = end + len(_TAG), _TAG


def _calls(text: str, position: int) -> tuple[list[dict[str, Any]], int]:
    """Return the calls up to the next tag or the end, and that position; no calls if there is anything else."""
    items, end = objects(text, position, ";")
    if items and (end == len(text) or text.startswith(_TAG, end)):
        return all_or_none([_call(item) for item in items]), end
    tag = text.find(_TAG, position)
    return [], len(text) if tag < 0 else tag


def _call(text: str) -> dict[str, Any] | None:
    if not {"parameters", "arguments"} & set(object_values(text) or ()):
        return None
    return call_of_object(text)
