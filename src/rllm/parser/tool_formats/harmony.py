"""Answers as a series of messages: those of gpt-oss, each on a channel, and of Muse Glimmer, each to a recipient.

Harmony, the format of gpt-oss: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rllm.parser.tool_formats.calls import is_object, new_call, object_end
from rllm.parser.tool_formats.qwen3_coder import AtemToolParser
from rllm.parser.tool_parser import ParsedText, ToolFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One message as written."""

    before: str
    """Text that belongs to no message."""
    header: str
    body: str
    end: str


class HarmonyToolParser(ToolFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The recipient may also stand before the channel. The analysis channel is reasoning; other channels are content.
    Every answer is written like this, so calls are found also where no tools were offered.
    """

    markers: tuple[str, ...] = (_START, _CHANNEL, _MESSAGE)
    opening_markers = ("to=",)
    markup: tuple[str, ...] = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END)
    reads_every_answer = True
    template_marks = (_CHANNEL,)  # other families address messages to recipients, too
    example = f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_MESSAGE}{{ARGUMENTS}}<|call|>"
    _end = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)")
    _header = re.compile(r"\A\s*to=|<\|start\|>|<\|channel\|>")
    _channel = re.compile(r"<\|channel\|>\s*(\w+)")
    _recipient = re.compile(r"\bto=([\w.-]+)")

    def parse(self, text: str) -> ParsedText:
        parts, rest = self._parts(text)
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            content.append(part.before)
            read = self._read(part)
            content.append(read.content)
            reasoning += [read.reasoning] if read.reasoning else []
            calls += read.tool_calls
        return ParsedText(content="".join(content) + rest, reasoning="\n".join(reasoning), tool_calls=calls)

    def _read(self, part: _Part) -> ParsedText:
        """Return what one message holds; a malformed call is content."""
        channel, recipient = self._channel.search(part.header), self._recipient.search(part.header)
        if recipient and is_object(part.body):
            name = recipient[1].removeprefix("functions.")
            return ParsedText(content="", tool_calls=[new_call(name, part.body.strip())])
        if recipient or not part.header:
            return ParsedText(content=part.header + _MESSAGE + part.body + part.end)
        if channel and channel[1] == "analysis":
            return ParsedText(content="", reasoning=part.body)
        return ParsedText(content=part.body)

    def _parts(self, text: str) -> tuple[list[_Part], str]:
        """Return the messages, and the text after the last of them."""
        parts: list[_Part] = []
        position = 0
        while (message := text.find(_MESSAGE, position)) >= 0:
            rest, start = text[position:message], message + len(_MESSAGE)
            header = self._header.search(rest)
            at = header.start() if header else len(rest)
            end, closing = self._end_of_body(text, start, is_call=self._recipient.search(rest, at) is not None)
            parts.append(_Part(before=rest[:at], header=rest[at:], body=text[start:end], end=closing))
            position = end + len(closing)
        return parts, text[position:]

    def _end_of_body(self, text: str, start: int, *, is_call: bool) -> tuple[int, str]:
        """Return the end of the body that begins here, and the token after it, ignoring those in JSON strings."""
        stop = object_end(text, start) if is_call else None
        if stop is not None and (closing := self._end.match(text, stop)):
            return stop, closing[0]
        if stop == len(text):
            return stop, ""
        following = text.find(_MESSAGE, start)
        limit = len(text) if following < 0 else following
        ended = self._end.search(text, start, limit)
        return (ended.start(), ended[0]) if ended else (limit, "")


class MuseToolParser(HarmonyToolParser):
    r"""` to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">...`, as Muse Glimmer models write calls.

    Each message is addressed to the user, to the model itself (which is reasoning), or to a tool.
    """

    markers = (_START, _MESSAGE)
    markup = (_START, _MESSAGE, "<|eom|>")
    template_marks = ("<atem:invoke",)
    example = (
        ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="KEY">VALUE'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
    )
    legend = "the tool's name for NAME, and for each argument a line with its key for KEY and its value for VALUE"
    _end = re.compile(r"<\|eo[mt]\|>|(?=<\|start\|>)")
    _header = re.compile(r"\A\s*to=|<\|start\|>")

    def __init__(self, calls: AtemToolParser | None = None) -> None:
        """Create the parser; `calls` parses messages to tools."""
        self._calls = calls or AtemToolParser()

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        return type(self)(self._calls.for_tools(tools))

    def _read(self, part: _Part) -> ParsedText:
        recipient = self._recipient.search(part.header)
        if recipient is not None and recipient[1] == "self":
            return ParsedText(content="", reasoning=part.body)
        if recipient is not None and recipient[1] != "user":
            calls = self._calls.parse(part.body).tool_calls
            return ParsedText(content="" if calls else part.header + _MESSAGE + part.body + part.end, tool_calls=calls)
        return ParsedText(content=part.body if part.header else _MESSAGE + part.body + part.end)
