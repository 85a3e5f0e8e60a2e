"""The model's text to OpenAI tool calls, without re-serialising what the model wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from rllm._runtime.lazy import lazy_names
from rllm.registry import resolve

__getattr__, _ = lazy_names(
    __name__,
    dict.fromkeys(("QwenToolParser", "R1ToolParser", "ToolParser", "get_tool_parser"), "rllm.parser.tool_call_parser"),
)
"""Names that users of the framework import from here."""

TOOL_PARSERS = {  # vLLM's names, too
    "hermes": "rllm.parser.tool_formats.hermes:HermesToolParser",
    "qwen": "rllm.parser.tool_formats.hermes:HermesToolParser",
    "qwen3_coder": "rllm.parser.tool_formats.qwen3_coder:Qwen3CoderToolParser",
    "qwen3_xml": "rllm.parser.tool_formats.qwen3_coder:Qwen3CoderToolParser",
    "glm45": "rllm.parser.tool_formats.qwen3_coder:Glm45ToolParser",
    "llama3_json": "rllm.parser.tool_formats.llama3:Llama3JsonToolParser",
    "mistral": "rllm.parser.tool_formats.mistral:MistralToolParser",
    "deepseek_r1": "rllm.parser.tool_formats.deepseek:DeepSeekToolParser",
    "r1": "rllm.parser.tool_formats.deepseek:DeepSeekToolParser",
    "deepseek_v3": "rllm.parser.tool_formats.deepseek:DeepSeekToolParser",
    "deepseek_v31": "rllm.parser.tool_formats.deepseek:DeepSeekToolParser",
    "harmony": "rllm.parser.tool_formats.harmony:HarmonyToolParser",
    "openai": "rllm.parser.tool_formats.harmony:HarmonyToolParser",
    "muse_glimmer": "rllm.parser.tool_formats.harmony:MuseToolParser",
}

_TOOL_PROMPT = re.compile(r"\{#- rllm tool prompt: (\w+) -#\}")

DEFAULT_FORMAT = "hermes"
"""For a chat template that prints no calls that are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """A model's text, taken apart."""

    content: str
    """Everything that is not part of a well-formed call, byte for byte."""
    reasoning: str = ""
    """Only from a format that marks reasoning itself, as Harmony does; `<think>` tags are `split_reasoning`'s."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In the OpenAI format: `{"id", "type": "function", "function": {"name", "arguments"}}`."""


class ToolFormat(Protocol):
    """Finds tool calls in text. It never raises: what is malformed stays content. Inherit from it for the defaults."""

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
    example: str = ""
    """Example of a call, for a prompt that teaches the format."""
    legend: str = "the tool's name for NAME and a JSON object of its arguments for {ARGUMENTS}"
    """Explanation of the example's placeholders."""

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Return the parser for answers to a request with these tools (in the OpenAI format).

        Only formats without typed values need the tools' schemas.
        """
        return self

    def parse(self, text: str) -> ParsedText: ...


def tool_parser(name: str) -> ToolFormat:
    """Return the parser of this short name or `package.module:Class`."""
    parser: ToolFormat = resolve(name, TOOL_PARSERS, kind="tool_parser")()
    return parser


def parser_of_answer(
    parser: ToolFormat | None, tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any
) -> ToolFormat | None:
    """Return the parser for the answer to a request with these tools; `None` if it cannot contain calls."""
    if parser is None:
        return None
    may_call = bool(tools) and tool_choice != "none"
    return parser.for_tools(tools or ()) if may_call or parser.reads_every_answer else None


def tool_format_of_template(template: str) -> str | None:
    """Return the name of the known format whose marks this chat template prints, or None.

    A tool prompt in front of a template decides it, whatever the template prints (see `tool_prompt`).
    """
    if prompt := _TOOL_PROMPT.match(template):
        return prompt[1]
    for name in TOOL_PARSERS:
        if _prints(template, tool_parser(name)):
            return name
    return None


def chosen_format(setting: str | None, template: str) -> str:
    """Return the configured format, else the one that the chat template prints, else the default."""
    return setting or tool_format_of_template(template) or DEFAULT_FORMAT


def _prints(template: str, parser: ToolFormat) -> bool:
    marked = any(mark.strip() in template for mark in parser.template_marks or parser.markers)
    return marked and not any(mark in template for mark in parser.foreign_marks)
