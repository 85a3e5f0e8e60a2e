"""Functions that find tool calls in a text, each for a manner of writing them; `tool_formats.py` has the families.

JSON arguments stay the exact text that the model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rllm.parser.tool_json import (
    Schemas,
    arguments_json,
    call_of_object,
    end_of_space,
    gemma_object,
    is_object,
    new_call,
    object_end,
    python_arguments,
    skip_space,
)
from rllm.types import JSONObject


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a text that is not content as it stands."""

    start: int
    end: int
    tool_calls: Sequence[JSONObject] = ()
    content: str = ""
    """Content in place of the piece."""
    reasoning: str = ""


def _find(text: str, token: str, position: int) -> int:
    """Return the position of the next token, or the end of the text."""
    found = text.find(token, position)
    return len(text) if found < 0 else found


@dataclass(frozen=True, kw_only=True)
class TaggedValues:
    """Calls with tags around the name and each argument, whose value is bare text.

    Only the tool's schema decides whether `5` is a number or text: without one every value is text, unless `parameter`
    has a second group, which is `true` for text. A value may contain other markup, except a call: it ends at the
    closing tag that another parameter, or the end of the call, follows.
    """

    opening: re.Pattern[str]
    parameter: re.Pattern[str]
    value_end: re.Pattern[str]
    closing: re.Pattern[str]

    def __call__(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        heads = list(self.opening.finditer(text))
        starts = [*(head.start() for head in heads), len(text)]
        for head, limit in zip(heads, starts[1:], strict=True):
            call, end = self._call(text, head, limit, schemas)
            if call is not None:
                yield Piece(head.start(), end, [call])

    def next_call(self, text: str, position: int, limit: int, schemas: Schemas) -> tuple[JSONObject | None, int]:
        """Return the call that begins here, if it is well-formed, and its end."""
        head = self.opening.match(text, position, limit)
        return self._call(text, head, limit, schemas) if head else (None, position)

    def _call(self, text: str, head: re.Match[str], limit: int, schemas: Schemas) -> tuple[JSONObject | None, int]:
        name, written, types, position = head[1].strip(), dict[str, str](), JSONObject(), head.end()
        while True:
            position = end_of_space(text, position, limit)
            if not (key := self.parameter.match(text, position, limit)):
                closed = self.closing.match(text, position, limit)
                if closed is None:
                    return None, position
                schema = schemas.get(name, {})
                if types:
                    schema = {**schema, "properties": types}
                return new_call(name, arguments_json(written, schema)), closed.end()
            if not (end := self.value_end.search(text, key.end(), limit)):
                return None, position
            written[key[1].strip()] = text[key.end() : end.start()]
            if self.parameter.groups > 1:
                types[key[1].strip()] = {"type": "string" if key[2] == "true" else _NO_STRING}
            position = end.end()


_NO_STRING = ["number", "boolean", "null", "array", "object"]


@dataclass(frozen=True, kw_only=True)
class CallBlock:
    """Calls between two marks; a block that holds anything else is content."""

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    next_call: Callable[[str, int, int, Schemas], tuple[JSONObject | None, int]]
    """Reads the call at a position of a text, before a limit where another block begins; returns it and its end."""

    def __call__(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        position = 0
        while opened := self.opening.search(text, position):
            following = self.opening.search(text, opened.end())
            limit = following.start() if following else len(text)
            calls, position = list[JSONObject](), end_of_space(text, opened.end())
            call, end = self.next_call(text, position, limit, schemas)
            while call is not None:
                calls.append(call)
                position = end_of_space(text, end)
                call, end = self.next_call(text, position, limit, schemas)
            if calls and (closed := self.closing.match(text, position)):
                position = closed.end()
                yield Piece(opened.start(), position, calls)
            else:
                position = max(opened.end(), opened.start() + 1)  # the mark may be the beginning of the text


_SEPARATOR_OF_OBJECTS = re.compile(r"\s*(?:[,;]\s*)?")


def next_object(
    text: str, position: int, _: int, __: Schemas, *, call_of: Callable[[str], JSONObject | None] = call_of_object
) -> tuple[JSONObject | None, int]:
    """Return the call in the JSON object that begins here, after a comma, and its end."""
    if between := _SEPARATOR_OF_OBJECTS.match(text, position):
        position = between.end()
    end = object_end(text, position)
    return (None, position) if end is None else (call_of(text[position:end].strip()), end)


_PYTHONIC = re.compile(r"\s*(?:,\s*)?([\w.-]+)\(")


def next_pythonic_call(text: str, position: int, _: int, __: Schemas) -> tuple[JSONObject | None, int]:
    """Return the call in Python's syntax that begins here, after a comma, and its end."""
    head = _PYTHONIC.match(text, position)
    found = python_arguments(text, head.end()) if head else None
    return (new_call(head[1], found[0]), found[1]) if head and found else (None, position)


_KIMI = re.compile(r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
_KIMI_END = re.compile(r"<\|tool_call_end\|>")


def next_kimi_call(text: str, position: int, _: int, __: Schemas) -> tuple[JSONObject | None, int]:
    """Return the call of Kimi that begins here, and its end; its id is the one that the model wrote."""
    head = _KIMI.match(text, position)
    end = object_end(text, head.end()) if head else None
    closed = _KIMI_END.match(text, end) if end is not None else None
    if head is None or closed is None or not is_object(arguments := text[head.end() : end].strip()):
        return None, position
    return {**new_call(head[2], arguments), "id": head[1]}, closed.end()


_GEMMA = re.compile(r"\s*call:([\w.-]+)(?=\{)")


def next_gemma_call(text: str, position: int, _: int, __: Schemas) -> tuple[JSONObject | None, int]:
    """Return the call of Gemma 4 that begins here, and its end."""
    head = _GEMMA.match(text, position)
    found = gemma_object(text, head.end()) if head else None
    return (new_call(head[1], found[0]), found[1]) if head and found else (None, position)


PYTHON, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\{))")
_ITEM = re.compile(r"\s*[\[,]")


def next_mistral_call(text: str, position: int, _: int, __: Schemas) -> tuple[JSONObject | None, int]:
    """Return the call that begins here, an item of a JSON array or since 2025 a name and its arguments, and its end."""
    if named := _NAMED.match(text, position):
        end = object_end(text, named.end())
        arguments = text[named.end() : end].strip()
        return (new_call(named[1], arguments), end) if end and is_object(arguments) else (None, position)
    item = _ITEM.match(text, position)
    end = object_end(text, item.end()) if item else None
    if item is None or end is None or text[end : end + 1] not in (",", "]"):
        return None, position
    return call_of_object(text[item.end() : end]), end + (text[end] == "]")


BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*function<｜tool▁sep｜>([^<\n]+)\n```(?:json)?\n")
_BARE = re.compile(r"\s*+([^<\n]+)<｜tool▁sep｜>")
_NEXT = re.compile(f"{CALL}|{BLOCK_END}|{BLOCK}")


def deepseek(text: str, _: Schemas) -> Iterator[Piece]:
    """Find blocks of calls, each call between tokens of its own.

    R1 writes `function`, the separator, a name and fenced JSON; V3.1 writes a name, the separator and bare JSON. The
    closing tokens may be missing at the very end. In a block with good and malformed calls the malformed ones stay
    content, each with its own tokens.
    """
    position = 0
    while (start := text.find(BLOCK, position)) >= 0:
        calls, rest = list[JSONObject](), list[str]()
        position = start + len(BLOCK)
        while (mark := _NEXT.search(text, position)) and mark[0] == CALL:
            rest.append(text[position : mark.start()].strip())
            call, position = _deepseek_call(text, mark.end())
            if call is None:
                rest.append(text[mark.start() : position])
            else:
                calls.append(call)
        rest.append(text[position : mark.start() if mark else len(text)].strip())
        position = len(text) if mark is None else mark.end() if mark[0] == BLOCK_END else mark.start()
        if calls:
            yield Piece(start, position, calls, content="".join(rest))


def _deepseek_call(text: str, start: int) -> tuple[JSONObject | None, int]:
    """Return the call that begins here, if it is well-formed, and its end, or else the next mark."""
    for match_head, closing in ((_FENCED.match, "```"), (_BARE.match, "")):
        found = match_head(text, start)
        end = object_end(text, found.end()) if found else None
        if found is None or end is None or not text.startswith(closing, end):
            continue
        arguments, end = text[found.end() : end].strip(), skip_space(text, end + len(closing))
        if text.startswith(CALL_END, end):
            end += len(CALL_END)
        elif end < len(text) and not _NEXT.match(text, end):
            continue
        if found[1].strip() and is_object(arguments):
            return new_call(found[1].strip(), arguments), end
    mark = _NEXT.search(text, start)
    return None, mark.start() if mark else len(text)


START, CHANNEL, MESSAGE, CONSTRAIN, END = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"
_HARMONY_HEADER = re.compile(r"\A\s*to=|<\|start\|>|<\|channel\|>")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_MUSE_HEADER = re.compile(r"\A\s*to=|<\|start\|>")
_MUSE_END = re.compile(r"<\|eo[mt]\|>|(?=<\|start\|>)")


@dataclass(frozen=True, slots=True)
class _Message:
    """One of the messages that an answer consists of, as written."""

    start: int
    header: str
    recipient: str
    body: str
    end: int


def _messages(text: str, headers: re.Pattern[str], ends: re.Pattern[str]) -> Iterator[_Message]:
    position = 0
    while (message := text.find(MESSAGE, position)) >= 0:
        before, start = text[position:message], message + len(MESSAGE)
        found = headers.search(before)
        header = before[found.start() :] if found else ""
        recipient = _RECIPIENT.search(header)
        # Tokens in the JSON strings of a call end nothing.
        end, closing = object_end(text, start) if recipient else None, ""
        if end is not None and (closed := ends.match(text, end)):
            closing = closed[0]
        elif end is None or end < len(text):
            limit = _find(text, MESSAGE, start)
            closed = ends.search(text, start, limit)
            end, closing = (closed.start(), closed[0]) if closed else (limit, "")
        position = end + len(closing)
        yield _Message(message - len(header), header, recipient[1] if recipient else "", text[start:end], position)


def harmony(text: str, _: Schemas) -> Iterator[Piece]:
    """Read messages on channels: https://cookbook.openai.com/articles/openai-harmony.

    The recipient of a call may stand after or before the channel. The analysis channel is reasoning; other channels are
    content.
    """
    for part in _messages(text, _HARMONY_HEADER, _HARMONY_END):
        channel = _CHANNEL_NAME.search(part.header)
        if part.recipient and is_object(part.body):
            name = part.recipient.removeprefix("functions.")
            yield Piece(part.start, part.end, [new_call(name, part.body.strip())])
        elif part.recipient or not part.header:
            continue
        elif channel and channel[1] == "analysis":
            yield Piece(part.start, part.end, reasoning=part.body)
        else:
            yield Piece(part.start, part.end, content=part.body)


def invocations(prefix: str, attributes: str = "") -> TaggedValues:
    """Return the finder for calls as DeepSeek V3.2, MiniMax M2 and Muse write them."""
    name = f"{prefix}parameter"
    return TaggedValues(
        opening=re.compile(rf'<{prefix}invoke name="([^"\n]+)">'),
        parameter=re.compile(rf'<{name} name="([^"\n]+)"{attributes}>'),
        value_end=re.compile(rf"</{name}>(?=\s*(?:<{name} |</{prefix}invoke>))"),
        closing=re.compile(f"</{prefix}invoke>"),
    )


_ATEM = invocations("atem:")


def muse(text: str, schemas: Schemas) -> Iterator[Piece]:
    """Read messages to the user, to the model itself (which is reasoning), and to tools."""
    for part in _messages(text, _MUSE_HEADER, _MUSE_END):
        if part.recipient == "self":
            yield Piece(part.start, part.end, reasoning=part.body)
        elif part.recipient and part.recipient != "user":
            calls = [call for piece in _ATEM(part.body, schemas) for call in piece.tool_calls]
            if calls:
                yield Piece(part.start, part.end, calls)
        elif part.header:
            yield Piece(part.start, part.end, content=part.body)
