"""A model's text to tool calls: choice of the format, and parsers as agents use them.

The formats themselves are rows of the table in `tool_formats.py`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rllm.errors import ConfigError
from rllm.parser.decoding import TextDecoder, Tokenizer, split_without_prompt
from rllm.parser.template_shape import CALLS, TOOLS
from rllm.parser.tool_formats import TOOL_FORMATS, ToolFormat
from rllm.registry import resolve
from rllm.types import JSONMapping, JSONObject, Message

if TYPE_CHECKING:
    from rllm.parser.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_TOOL_PROMPT = re.compile(r"\{#- rllm tool prompt: (\w+) -#\}")

DEFAULT_FORMAT = "hermes"
"""For a chat template that prints no calls that are known."""

_VALUES = {
    "text": 'a "quoted" word,\nand café',
    "digits": "7",
    "whole": 2,
    "part": 0.5,
    "flag": True,
    "items": [1, "x"],
    "nested": {"key": {"inner": "value"}},
}
_TYPES = ("string", "string", "integer", "number", "boolean", "array", "object")
_ASK: Message = {"role": "user", "content": "Call it."}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(_VALUES)}}
    ],
}
_TOOL: JSONObject = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind, "description": "."} for key, kind in zip(_VALUES, _TYPES, strict=True)},
            "required": list(_VALUES),
        },
    },
}
"""A call with values of every kind, by which a format is tried."""


def tool_parser(name: str) -> ToolFormat:
    """Return the format of this name in `TOOL_FORMATS`, or of `package.module:NAME`, which names a `ToolFormat`.

    Raises:
        ConfigError: if there is none.
    """
    found = TOOL_FORMATS.get(name) or resolve(name, dict.fromkeys(TOOL_FORMATS, ""), kind="tool_parser")
    if not isinstance(found, ToolFormat):
        raise ConfigError(f"tool_parser={name!r}: name an object of type rllm.parser.tool_formats.ToolFormat")
    return found


def parser_of_answer(
    parser: ToolFormat | None, tools: Sequence[JSONMapping] | None, tool_choice: object
) -> ToolFormat | None:
    """Return the parser for the answer to a request with these tools; `None` if it cannot contain calls."""
    if parser is None:
        return None
    if parser.reads_every_answer or (tools and tool_choice != "none"):
        return parser.for_tools(tools or ())
    return parser.without_calls() if parser.reasoning_tags else None


def tool_format_of_template(template: str) -> str | None:
    """Return the name of the known format whose marks this chat template prints, or None.

    A tool prompt in front of a template decides it, whatever the template prints (see `tool_prompt`).
    """
    if prompt := _TOOL_PROMPT.match(template):
        return prompt[1]
    return next((name for name, known in TOOL_FORMATS.items() if known.is_printed_by(template)), None)


def chosen_format(setting: str | None, template: str) -> str:
    """Return the configured format, else the one that the chat template prints, else the default."""
    return setting or tool_format_of_template(template) or DEFAULT_FORMAT


def unread_calls(template: ChatTemplate, chosen: ToolFormat) -> str:
    """Return why calls cannot be read as the template prints them; empty if a call with values of every kind can be."""
    from rllm.parser.answer import AnswerReader

    if CALLS in template.shape.lost:
        return "the chat template prints no tool calls"
    try:
        ids, prompt_ids = template.printed_answer(_ASK, _CALL, [_TOOL])
    except ConfigError:  # it prints a call only before its result
        return ""
    reader = AnswerReader(
        TextDecoder(template.tokenizer, markup=chosen.markup),
        prompt_ids=prompt_ids,
        stop=(),
        tool_parser=chosen.for_tools([_TOOL]),
    )
    read = [call["function"] for call in reader.read(ids).tool_calls]
    written = _CALL["tool_calls"][0]["function"]
    if not read:
        return "the chat template prints tool calls that are not found"
    if len(read) != 1 or read[0]["name"] != written["name"]:
        return "the chat template prints tool calls that are found under other names"
    arguments = json.loads(read[0]["arguments"])
    changed = [key for key, value in _VALUES.items() if arguments.get(key) != value]
    return f"the chat template prints arguments that are read differently ({', '.join(changed)})" if changed else ""


def log_unread_calls(
    template: ChatTemplate, chosen: ToolFormat, consequence: str = "calls in answers stay text"
) -> bool:
    """Return whether the format does not read calls as the template prints them; log it with the consequence.

    Of a template that prints no calls this is not known, which is logged if it prints tools. That it prints neither is
    logged when a request has tools.
    """
    lost = template.shape.lost
    is_unknown = CALLS in lost
    unread = "" if is_unknown and TOOLS in lost else unread_calls(template, chosen)
    remedy = "set model.tool_parser to the model's format, or model.tool_prompt=hermes"
    if is_unknown:
        consequence = "calls may be read inexactly, and earlier ones are missing where a prompt is rendered again"
        remedy = "set model.tool_prompt=hermes"
    if unread:
        logger.warning("%s, so %s: %s; conversations without tools are exact", unread, consequence, remedy)
    return bool(unread) and not is_unknown


@dataclass(slots=True)
class ToolCall:
    """One call that a model asks for."""

    name: str
    arguments: JSONObject = field(default_factory=dict)

    def to_dict(self) -> JSONObject:
        """Return `name` and `arguments` as a new object; OpenAI's format has the arguments as JSON text."""
        return {"name": self.name, "arguments": dict(self.arguments)}


class ToolParser:
    """Parser of one format, for agents: a list of `ToolCall`s, and a prompt that teaches the format.

    A subclass may implement `parse` and `get_tool_prompt` by itself.
    """

    format: ClassVar[str]

    @staticmethod
    def get_parser(tokenizer: Tokenizer) -> ToolParser:
        """Return the parser of the format in which this tokenizer's chat template prints calls.

        Raises:
            ConfigError: if the format is not known.
        """
        from rllm.parser.chat_template import ChatTemplate  # which itself needs this module

        name = tool_format_of_template(ChatTemplate(tokenizer).text)
        if name is None:
            raise ConfigError(
                "the tokenizer's chat template prints tool calls in no known format: choose one with "
                f"get_tool_parser(NAME), one of {sorted(TOOL_FORMATS)}"
            )
        return get_tool_parser(name)()

    def parse(self, text: str) -> list[ToolCall]:
        """Return the well-formed calls of the answer, in order.

        Calls inside reasoning do not count, even if the prompt opened it (`<think>`). Formats that write values as bare
        text (`qwen3_coder`) return every value as text.
        """
        calls = tool_parser(self.format).parse(split_without_prompt(text).answer).tool_calls
        return [ToolCall(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]

    def get_tool_prompt(self, tools_schema: str) -> str:
        """Return a system prompt's section on tools; `tools_schema` is their JSON schema as text."""
        chosen = tool_parser(self.format)
        return (
            f"# Tools\n\nThese tools are at your disposal, each described by a JSON schema:\n<tools>\n{tools_schema}\n"
            f"</tools>\n\nTo call one, write exactly this, with {chosen.legend}:\n{chosen.example}\n"
        )


class QwenToolParser(ToolParser):
    """The format of Qwen and Hermes models."""

    format = "qwen"


class R1ToolParser(ToolParser):
    """The format of DeepSeek models."""

    format = "deepseek_r1"


_CLASSES = {"qwen": QwenToolParser, "hermes": QwenToolParser, "r1": R1ToolParser, "deepseek_r1": R1ToolParser}


def get_tool_parser(parser_name: str) -> type[ToolParser]:
    """Return the parser class of a format, such as `qwen` or `llama3_json`; see `tool_parser`.

    Raises:
        ConfigError: if the format does not exist.
    """
    tool_parser(parser_name)
    return _CLASSES.get(parser_name) or type("NamedToolParser", (ToolParser,), {"format": parser_name})
