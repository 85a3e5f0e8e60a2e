"""Answers as gpt-oss models write them: a series of messages, each on a channel, as the Harmony format has it.

The format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rllm.parser.tool_formats.calls import is_object, new_call, object_end
from rllm.parser.tool_parser import ParsedText, ToolFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One message as written."""

    before: str
    """What belongs to no message."""
    header: str
    body: str
    end: str


class HarmonyToolParser(ToolFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The recipient may also stand before the channel. The analysis channel is reasoning; other channels are content.
    Every answer is written like this, so calls are found also where no tools were offered.
    """

    markers = (_START, _CHANNEL, _MESSAGE)
    opening_markers = ("to=",)
    markup = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END)
    reads_every_answer = True
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
            channel, recipient = self._channel.search(part.header), self._recipient.search(part.header)
            content.append(part.before)
            if recipient and is_object(part.body):
                calls.append(new_call(recipient[1].removeprefix("functions."), part.body.strip()))
            elif recipient or not part.header:
                content.append(part.header + _MESSAGE + part.body + part.end)
            elif channel and channel[1] == "analysis":
                reasoning.append(part.body)
            else:
                content.append(part.body)
        return ParsedText(content="".join(content) + rest, reasoning="\n".join(reasoning), tool_calls=calls)

    def _parts(self, text: str) -> tuple[list[_Part], str]:
        """The messages, and what follows the last of them."""
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
        """Where the body that begins here ends, and the token behind it; tokens in the strings of a call's arguments end nothing."""
        stop = object_end(text, start) if is_call else None
        if stop is not None and (closing := self._end.match(text, stop)):
            return stop, closing[0]
        if stop == len(text):
            return stop, ""
        following = text.find(_MESSAGE, start)
        limit = len(text) if following < 0 else following
        ended = self._end.search(text, start, limit)
        return (ended.start(), ended[0]) if ended else (limit, "")
