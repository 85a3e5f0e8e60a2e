"""Formats in which families of models write tool calls: a table with one row per family.

A row has a function that finds calls in a text, and the marks by which chat templates, decoders and streams recognise
the format. JSON arguments stay the exact text that the model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rllm.parser.tool_json import (
    Schemas,
    all_or_none,
    arguments_json,
    call_of_object,
    is_object,
    new_call,
    object_end,
    object_values,
    objects,
    schemas_of,
    skip_space,
)
from rllm.types import JSONMapping, JSONObject


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """A model's text, taken apart."""

    content: str
    """Everything that is not part of a well-formed call, byte for byte."""
    reasoning: str = ""
    """Only from a format that marks reasoning itself, as Harmony does; `<think>` tags are `split_reasoning`'s."""
    tool_calls: list[JSONObject] = field(default_factory=list)
    """In the OpenAI format: `{"id", "type": "function", "function": {"name", "arguments"}}`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a text that is not content as it stands."""

    start: int
    end: int
    tool_calls: Sequence[JSONObject] = ()
    content: str = ""
    """Content in place of the piece."""
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Format of tool calls. Parsing never raises: what is malformed stays content."""

    find: Callable[[str, Schemas], Iterable[Piece]]
    """Yields the well-formed calls of a text, and other markup, in order."""
    markers: tuple[str, ...]
    """A call begins with one of these; while text may still become one, it is not shown to a streaming client."""
    opening_markers: tuple[str, ...] = ()
    """With one of these a call begins only where nothing but white space stands before it."""
    markup: tuple[str, ...] = ()
    """Tokens of the format, which decoding must leave in the text although tokenizers may call them special."""
    reads_every_answer: bool = False
    """True where every answer is written in this format, also where no tools are offered."""
    template_marks: tuple[str, ...] = ()
    """Marks of templates that print this format; without any, the markers decide."""
    foreign_marks: tuple[str, ...] = ()
    """A template that has one of these prints another format, although it has the marks."""
    example: str
    """Example of a call, for a prompt that teaches the format."""
    legend: str = "the tool's name for NAME and a JSON object of its arguments for {ARGUMENTS}"
    schemas: Schemas = field(default_factory=dict)
    """Parameters of the tools, for formats whose values have no types."""

    def for_tools(self, tools: Sequence[JSONMapping]) -> ToolFormat:
        """Return the parser for answers to a request with these tools (in the OpenAI format)."""
        return replace(self, schemas=schemas_of(tools))

    def parse(self, text: str) -> ParsedText:
        """Return the text's content, reasoning and calls."""
        content: list[str] = []
        calls: list[JSONObject] = []
        reasoning: list[str] = []
        shown = 0
        for piece in self.find(text, self.schemas):
            content += [text[shown : piece.start], piece.content]
            calls += piece.tool_calls
            reasoning += [piece.reasoning] if piece.reasoning else []
            shown = piece.end
        content.append(text[shown:])
        return ParsedText(content="".join(content), reasoning="\n".join(reasoning), tool_calls=calls)

    def is_printed_by(self, template: str) -> bool:
        """Return whether a chat template prints calls in this format."""
        marked = any(mark.strip() in template for mark in self.template_marks or self.markers)
        return marked and not any(mark in template for mark in self.foreign_marks)


def _find(text: str, token: str, position: int) -> int:
    """Return the position of the next token, or the end of the text."""
    found = text.find(token, position)
    return len(text) if found < 0 else found


def _tagged_objects(text: str, _: Schemas, *, opening: re.Pattern[str], closing: str) -> Iterator[Piece]:
    """Find JSON objects of a name and arguments between tags.

    A closing tag may be missing at the very end, where the model stopped right after the object.
    """
    position = 0
    while opened := opening.search(text, position):
        call, end = None, object_end(text, opened.end())
        if end is not None and (end == len(text) or text.startswith(closing, end)):
            call = call_of_object(text[opened.end() : end])
        else:
            end = _find(text, closing, opened.end())
        position = end + len(closing)
        if call is not None:
            yield Piece(opened.start(), position, [call])


_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, kw_only=True)
class _TaggedValues:
    """Calls with tags around the name and each argument, whose value is bare text.

    Only the tool's schema decides whether `5` is a number or text: without one every value is text. A value may contain
    other markup, except a call: it ends at the closing tag that another parameter, or the end of the call, follows.
    """

    opening: re.Pattern[str]
    parameter: re.Pattern[str]
    value_end: re.Pattern[str]
    closing: re.Pattern[str]

    def __call__(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        heads = list(self.opening.finditer(text))
        starts = [*(head.start() for head in heads), len(text)]
        for head, limit in zip(heads, starts[1:], strict=True):
            written, end = self._arguments(text, head.end(), limit)
            if written is not None:
                name = head[1].strip()
                yield Piece(head.start(), end, [new_call(name, arguments_json(written, schemas.get(name, {})))])

    def _arguments(self, text: str, position: int, limit: int) -> tuple[dict[str, str] | None, int]:
        """Return the arguments that begin here, as written, and the end of the call; `None` if malformed."""
        written: dict[str, str] = {}
        while True:
            if space := _SPACE.match(text, position, limit):
                position = space.end()
            if not (key := self.parameter.match(text, position, limit)):
                closed = self.closing.match(text, position, limit)
                return (written, closed.end()) if closed else (None, position)
            if not (end := self.value_end.search(text, key.end(), limit)):
                return None, position
            written[key[1].strip()] = text[key.end() : end.start()]
            position = end.end()


_PYTHON = "<|python_tag|>"


def _llama3(text: str, _: Schemas) -> Iterator[Piece]:
    """Find JSON objects, with `;` between them, that are the whole answer or that follow a tag.

    An answer that happens to be a JSON object is a call only if it has a name and parameters. What follows a tag is
    either calls from end to end or content: half of it is never run.
    """
    start = position = 0
    while True:
        calls: list[JSONObject] = []
        items, end = objects(text, position, ";")
        if items and (end == len(text) or text.startswith(_PYTHON, end)):
            if all({"parameters", "arguments"} & set(object_values(item) or ()) for item in items):
                calls = all_or_none([call_of_object(item) for item in items])
        else:
            end = _find(text, _PYTHON, position)
        if calls:
            yield Piece(start, end, calls)
        if end == len(text):
            return
        start, position = end, end + len(_PYTHON)


_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\{))")


def _mistral(text: str, _: Schemas) -> Iterator[Piece]:
    """Find a JSON array of calls after each tag, or since 2025 one name and its arguments.

    What follows a tag is either calls from end to end or content.
    """
    position = _find(text, _TOOL_CALLS, 0)
    while position < len(text):
        start = position + len(_TOOL_CALLS)
        calls, end = _mistral_calls(text, start)
        if end is None or not (end == len(text) or text.startswith(_TOOL_CALLS, end)):
            calls, end = [], _find(text, _TOOL_CALLS, start)
        if calls:
            yield Piece(position, end, calls)
        position = end


def _mistral_calls(text: str, start: int) -> tuple[list[JSONObject], int | None]:
    """Return the calls that begin here, if they are well-formed, and their end."""
    if named := _NAMED.match(text, start):
        end = object_end(text, named.end())
        arguments = text[named.end() : end].strip()
        return ([new_call(named[1], arguments)] if is_object(arguments) else []), end
    start = skip_space(text, start)
    items, end = objects(text, start + 1, ",")
    if not text.startswith("[", start) or not text.startswith("]", end):
        return [], None
    return all_or_none([call_of_object(item) for item in items]), skip_space(text, end + 1)


_BLOCK, _BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*function<｜tool▁sep｜>([^<\n]+)\n```(?:json)?\n")
_BARE = re.compile(r"\s*+([^<\n]+)<｜tool▁sep｜>")
_NEXT = re.compile(f"{_CALL}|{_BLOCK_END}|{_BLOCK}")


def _deepseek(text: str, _: Schemas) -> Iterator[Piece]:
    """Find blocks of calls, each call between tokens of its own.

    R1 writes `function`, the separator, a name and fenced JSON; V3.1 writes a name, the separator and bare JSON. The
    closing tokens may be missing at the very end. In a block with good and malformed calls the malformed ones stay
    content, each with its own tokens.
    """
    position = 0
    while (start := text.find(_BLOCK, position)) >= 0:
        calls, rest = list[JSONObject](), list[str]()
        position = start + len(_BLOCK)
        while (mark := _NEXT.search(text, position)) and mark[0] == _CALL:
            rest.append(text[position : mark.start()].strip())
            call, position = _deepseek_call(text, mark.end())
            if call is None:
                rest.append(text[mark.start() : position])
            else:
                calls.append(call)
        rest.append(text[position : mark.start() if mark else len(text)].strip())
        position = len(text) if mark is None else mark.end() if mark[0] == _BLOCK_END else mark.start()
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
        if text.startswith(_CALL_END, end):
            end += len(_CALL_END)
        elif end < len(text) and not _NEXT.match(text, end):
            continue
        if found[1].strip() and is_object(arguments):
            return new_call(found[1].strip(), arguments), end
    mark = _NEXT.search(text, start)
    return None, mark.start() if mark else len(text)


_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"
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
    while (message := text.find(_MESSAGE, position)) >= 0:
        before, start = text[position:message], message + len(_MESSAGE)
        found = headers.search(before)
        header = before[found.start() :] if found else ""
        recipient = _RECIPIENT.search(header)
        # Tokens in the JSON strings of a call end nothing.
        end, closing = object_end(text, start) if recipient else None, ""
        if end is not None and (closed := ends.match(text, end)):
            closing = closed[0]
        elif end is None or end < len(text):
            limit = _find(text, _MESSAGE, start)
            closed = ends.search(text, start, limit)
            end, closing = (closed.start(), closed[0]) if closed else (limit, "")
        position = end + len(closing)
        yield _Message(message - len(header), header, recipient[1] if recipient else "", text[start:end], position)


def _harmony(text: str, _: Schemas) -> Iterator[Piece]:
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


_ATEM = _TaggedValues(
    opening=re.compile(r'<atem:invoke name="([^"\n]+)">'),
    parameter=re.compile(r'<atem:parameter name="([^"\n]+)">'),
    value_end=re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter |</atem:invoke>))"),
    closing=re.compile(r"</atem:invoke>"),
)


def _muse(text: str, schemas: Schemas) -> Iterator[Piece]:
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


# The single newline before a call belongs to its markup (chat templates print it), so that an answer rendered again
# gives the same text.
_HERMES = ToolFormat(
    find=partial(_tagged_objects, opening=re.compile(r"\n?<tool_call>"), closing="</tool_call>"),
    markers=("\n<tool_call>", "<tool_call>"),
    markup=("<tool_call>", "</tool_call>"),
    foreign_marks=("<function=", "<arg_key>"),  # of Qwen3-Coder and of GLM, which write no JSON between these tags
    example='<tool_call>\n{"name": "NAME", "arguments": {ARGUMENTS}}\n</tool_call>',
)
# The models often leave out <tool_call>; its closing tag may be missing too.
_QWEN3_CODER = ToolFormat(
    find=_TaggedValues(
        opening=re.compile(r"\n{0,2}(?:<tool_call>\s{0,8})?<function=([^<>\n]+)>"),
        parameter=re.compile(r"<parameter=([^<>\n]+)>\n?"),
        value_end=re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"),
        closing=re.compile(r"</function>(?:\s*</tool_call>)?"),
    ),
    markers=tuple(line + tag for tag in ("<tool_call>", "<function=") for line in ("\n\n", "\n", "")),
    markup=("<tool_call>", "</tool_call>"),
    template_marks=("<parameter=",),
    example="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    legend="the tool's name for NAME, and for each argument a block with its key for KEY and its value for VALUE",
)
_DEEPSEEK = ToolFormat(
    find=_deepseek,
    markers=(_BLOCK,),
    markup=(_BLOCK, _BLOCK_END, _CALL, _CALL_END, _SEPARATOR),
    example=f"{_BLOCK}{_CALL}function{_SEPARATOR}NAME\n```json\n{{ARGUMENTS}}\n```{_CALL_END}{_BLOCK_END}",
)
_HARMONY = ToolFormat(
    find=_harmony,
    markers=(_START, _CHANNEL, _MESSAGE),
    opening_markers=("to=",),
    markup=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END),
    reads_every_answer=True,
    template_marks=(_CHANNEL,),  # other families address messages to recipients, too
    example=f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_MESSAGE}{{ARGUMENTS}}<|call|>",
)

TOOL_FORMATS: dict[str, ToolFormat] = {  # vLLM's names, too
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "glm45": ToolFormat(
        find=_TaggedValues(
            opening=re.compile(r"\n?<tool_call>([^<>\n]+)"),
            parameter=re.compile(r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>"),
            value_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
            closing=re.compile(r"</tool_call>"),
        ),
        markers=("\n<tool_call>", "<tool_call>"),
        markup=("<tool_call>", "</tool_call>"),
        template_marks=("<arg_key>",),
        example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        legend="the tool's name for NAME, and for each argument its key for KEY and its value for VALUE",
    ),
    "llama3_json": ToolFormat(
        find=_llama3,
        markers=(_PYTHON,),
        opening_markers=("{",),
        markup=(_PYTHON,),
        template_marks=(_PYTHON, "<|start_header_id|>ipython"),  # without built-in tools a template prints no tag
        example='{"name": "NAME", "parameters": {ARGUMENTS}}',
    ),
    "mistral": ToolFormat(
        find=_mistral,
        markers=(_TOOL_CALLS,),
        markup=(_TOOL_CALLS, "[CALL_ID]", "[ARGS]"),
        example='[TOOL_CALLS][{"name": "NAME", "arguments": {ARGUMENTS}}]',
    ),
    "deepseek_r1": _DEEPSEEK,
    "r1": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "harmony": _HARMONY,
    "openai": _HARMONY,
    "muse_glimmer": ToolFormat(
        find=_muse,
        markers=(_START, _MESSAGE),
        opening_markers=("to=",),
        markup=(_START, _MESSAGE, "<|eom|>"),
        reads_every_answer=True,
        template_marks=("<atem:invoke",),
        example=(
            ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="KEY">VALUE'
            "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
        ),
        legend="the tool's name for NAME, and for each argument a line with its key for KEY and its value for VALUE",
    ),
}
