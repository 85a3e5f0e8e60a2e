"""Calls of Qwen3-Coder and Qwen3.5 models: tags for the name and for each argument, whose value is bare text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rllm.parser.tool_formats.calls import arguments_json, new_call, schemas_of
from rllm.parser.tool_parser import ParsedText, ToolFormat


class Qwen3CoderToolParser(ToolFormat):
    r"""`<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>`.

    Only the tool's schema decides whether `5` is a number or text: without `for_tools` every value is text. A value may
    contain other markup, except a call: it ends at the closing tag that another parameter, or the end of the call,
    follows. The models often leave out `<tool_call>`; its closing tag may be missing too. The empty line before a call
    belongs to its markup (chat templates print it).
    """

    markers = tuple(line + tag for tag in ("<tool_call>", "<function=") for line in ("\n\n", "\n", ""))
    markup = ("<tool_call>", "</tool_call>")
    template_marks = ("<parameter=",)
    example = "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    legend = "the tool's name for NAME, and for each argument a block with its key for KEY and its value for VALUE"
    _open = re.compile(r"\n{0,2}(?:<tool_call>\s{0,8})?<function=([^<>\n]+)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
    _value_end = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
    _close = re.compile(r"\s*</function>(?:\s*</tool_call>)?")

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`schemas`: the parameters of each tool, as a JSON schema."""
        self._schemas = schemas or {}

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        return type(self)(schemas_of(tools))

    def parse(self, text: str) -> ParsedText:
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        shown = 0
        heads = list(self._open.finditer(text))
        starts = [*(head.start() for head in heads), len(text)]
        for head, limit in zip(heads, starts[1:], strict=True):
            written, end = self._written(text, head.end(), limit)
            if written is not None:
                name = head[1].strip()
                content.append(text[shown : head.start()])
                shown = end
                calls.append(new_call(name, arguments_json(written, self._schemas.get(name, {}))))
        content.append(text[shown:])
        return ParsedText(content="".join(content), tool_calls=calls)

    def _written(self, text: str, position: int, limit: int) -> tuple[dict[str, str] | None, int]:
        """Return the arguments that begin here, as written, and the end of the call; `None` if malformed."""
        written: dict[str, str] = {}
        while key := self._parameter.match(text, position, limit):
            end = self._value_end.search(text, key.end(), limit)
            if end is None:
                return None, position
            written[key[1].strip()] = text[key.end() : end.start()]
            position = end.end()
        closed = self._close.match(text, position, limit)
        return (written, closed.end()) if closed else (None, position)


class Glm45ToolParser(Qwen3CoderToolParser):
    r"""`<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>` of GLM 4.5 models."""

    markers = ("\n<tool_call>", "<tool_call>")
    template_marks = ("<arg_key>",)
    example = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
    legend = "the tool's name for NAME, and for each argument its key for KEY and its value for VALUE"
    _open = re.compile(r"\n?<tool_call>([^<>\n]+)")
    _parameter = re.compile(r"\s*<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>")
    _value_end = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
    _close = re.compile(r"\s*</tool_call>")


class AtemToolParser(Qwen3CoderToolParser):
    r"""`<atem:invoke name="NAME">\n<atem:parameter name="KEY">VALUE</atem:parameter>\n</atem:invoke>`.

    It stands within a message to a tool; `MuseToolParser` reads the messages.
    """

    _open = re.compile(r'<atem:invoke name="([^"\n]+)">')
    _parameter = re.compile(r'\s*<atem:parameter name="([^"\n]+)">')
    _value_end = re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter |</atem:invoke>))")
    _close = re.compile(r"\s*</atem:invoke>")
