"""Tool calls as agents read them: a list of `ToolCall`s from a model's text, and a prompt that teaches the format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from rllm.errors import ConfigError
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.reasoning import split_without_prompt
from rllm.parser.tool_parser import TOOL_PARSERS, ToolFormat, tool_format_of_template, tool_parser


class ToolParser:
    """Parser of one format, built on its `rllm.parser.tool_parser.ToolFormat`.

    A subclass may implement `parse` and `get_tool_prompt` by itself.
    """

    format: ClassVar[str]
    """A name of `TOOL_PARSERS`, or `package.module:Class`."""

    @cached_property
    def _format(self) -> ToolFormat:
        return tool_parser(self.format)

    @staticmethod
    def get_parser(tokenizer: Any) -> ToolParser:
        """Return the parser of the format in which this tokenizer's chat template prints calls.

        Raises:
            ConfigError: if the format is not known.
        """
        name = tool_format_of_template(ChatTemplate(tokenizer).text)
        if name is None:
            raise ConfigError(
                f"the chat template prints no tool calls that are known: name the format, one of {sorted(TOOL_PARSERS)}"
            )
        return get_tool_parser(name)()

    def parse(self, text: str) -> list[ToolCall]:
        """Return the well-formed calls of the answer, in order.

        Calls inside reasoning do not count, even if the prompt opened it (`<think>`). Formats that write values as bare
        text (`qwen3_coder`) return every value as text.
        """
        calls = self._format.parse(split_without_prompt(text).answer).tool_calls
        return [_tool_call(call["function"]) for call in calls]

    def get_tool_prompt(self, tools_schema: str) -> str:
        """Return a system prompt's section on tools; `tools_schema` is their JSON schema as text."""
        return (
            f"# Tools\n\nThese tools are at your disposal, each described by a JSON schema:\n<tools>\n{tools_schema}\n"
            f"</tools>\n\nTo call one, write exactly this, with {self._format.legend}:\n{self._format.example}\n"
        )


class QwenToolParser(ToolParser):
    """The format of Qwen and Hermes models."""

    format = "qwen"


class R1ToolParser(ToolParser):
    """The format of DeepSeek models."""

    format = "deepseek_r1"


def get_tool_parser(parser_name: str) -> type[ToolParser]:
    """Return the parser class of a format.

    `parser_name` is a short name (`qwen`, `qwen3_coder`, `r1`, `llama3_json`, `mistral`, `harmony`, ...) or
    `package.module:Class`.

    Raises:
        ConfigError: if there is no such format.
    """
    tool_parser(parser_name)
    if parser_name in _CLASSES:
        return _CLASSES[parser_name]
    return type("NamedToolParser", (ToolParser,), {"format": parser_name})


_CLASSES = {"qwen": QwenToolParser, "hermes": QwenToolParser, "r1": R1ToolParser, "deepseek_r1": R1ToolParser}


def _tool_call(function: dict[str, Any]) -> ToolCall:
    return ToolCall(name=function["name"], arguments=json.loads(function["arguments"]))


@dataclass(slots=True)
class ToolCall:
    """One call that a model asks for."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """`name` and `arguments`, as an object of its own; OpenAI's format has the arguments as JSON text."""
        return {"name": self.name, "arguments": dict(self.arguments)}
