"""Formats in which families of models write tool calls: a table with one row per family.

A row has a function that finds calls in a text (`tool_finders.py`), and the marks by which chat templates, decoders and
streams recognize the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rllm.parser.tool_finders import (
    BLOCK,
    BLOCK_END,
    CALL,
    CALL_END,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    PYTHON,
    SEPARATOR,
    START,
    TOOL_CALLS,
    CallBlock,
    Piece,
    TaggedValues,
    deepseek,
    harmony,
    invocations,
    muse,
    next_gemma_call,
    next_kimi_call,
    next_mistral_call,
    next_object,
    next_pythonic_call,
)
from rllm.parser.tool_json import Schemas, call_of_object, call_of_pair, call_with_arguments, schemas_of
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


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Format of tool calls. Parsing never raises: what is malformed stays content."""

    find: Callable[[str, Schemas], Iterable[Piece]]
    """Yields the well-formed calls of a text, and other markup, in order."""
    markers: tuple[str, ...]
    """A call begins with one of these; while text may still become one, it is not shown to a streaming client."""
    opening_markers: tuple[str, ...] = ()
    """A call begins with one of these only if nothing but white space precedes it."""
    markup: tuple[str, ...] = ()
    """Tokens of the format, which decoding must leave in the text although tokenizers may call them special."""
    reads_every_answer: bool = False
    """True if every answer is written in this format, even if no tools are offered."""
    template_marks: tuple[str, ...] = ()
    """Marks of templates that print this format; without any, the markers decide."""
    reasoning_tags: tuple[str, str] | None = None
    """Tags around reasoning where these are not `<think>` and `</think>`."""
    example: str
    """Example of a call, for a prompt that teaches the format."""
    legend: str = "the tool's name for NAME and a JSON object of its arguments for {ARGUMENTS}"
    schemas: Schemas = field(default_factory=dict)
    """Parameters of the tools, for formats whose values have no types."""

    def for_tools(self, tools: Sequence[JSONMapping]) -> ToolFormat:
        """Return the parser for answers to a request with these tools (in the OpenAI format)."""
        return replace(self, schemas=schemas_of(tools))

    def without_calls(self) -> ToolFormat:
        """Return the parser for answers to a request without tools, which reads no calls."""
        return replace(self, find=lambda text, schemas: (), markers=(), opening_markers=())

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
        return any(mark.strip() in template for mark in self.template_marks or self.markers)


_NAMES_AND_VALUES = "the tool's name for NAME, and for each argument its key for KEY and its value for VALUE"


def _json_list(
    opening: str,
    closing: str,
    *,
    item: str = '{"name": "NAME", "arguments": {ARGUMENTS}}',
    call_of: Callable[[str], JSONObject | None] = call_of_object,
    reasoning_tags: tuple[str, str] | None = None,
) -> ToolFormat:
    """Return a format of JSON objects in a list between tags, of which the closing one may be missing at the end."""
    tag = re.escape(closing)
    return ToolFormat(
        find=CallBlock(
            opening=re.compile(rf"\n?{re.escape(opening)}\s*\[?"),
            closing=re.compile(rf"\]\s*(?:{tag}|\Z)|{tag}"),
            next_call=partial(next_object, call_of=call_of),
        ),
        markers=(f"\n{opening}", opening),
        markup=(opening, closing, *(reasoning_tags or ())),
        template_marks=(opening,),
        example=f"{opening}[{item}]{closing}",
        reasoning_tags=reasoning_tags,
    )


# The single newline before a call belongs to its markup (chat templates print it), so that an answer rendered again
# gives the same text.
_HERMES = ToolFormat(
    find=CallBlock(
        opening=re.compile(r"\n?<tool_call>"), closing=re.compile(r"</tool_call>|\Z"), next_call=next_object
    ),
    markers=("\n<tool_call>", "<tool_call>"),
    markup=("<tool_call>", "</tool_call>"),
    example='<tool_call>\n{"name": "NAME", "arguments": {ARGUMENTS}}\n</tool_call>',
)


def _functions(tag: str, *, required: bool, reasoning_tags: tuple[str, str] | None = None) -> ToolFormat:
    """Return the format of Qwen3-Coder; its models often leave out the opening tag, and the closing one, too."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    return ToolFormat(
        find=TaggedValues(
            opening=re.compile(rf"\n{{0,2}}(?:{opening}\s{{0,8}}){'' if required else '?'}<function=([^<>\n]+)>"),
            parameter=re.compile(r"<parameter=([^<>\n]+)>\n?"),
            value_end=re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"),
            closing=re.compile(rf"</function>(?:\s*{closing})?"),
        ),
        markers=tuple(line + mark for mark in (opening, "<function=") for line in ("\n\n", "\n", "")),
        markup=(opening, closing, *(reasoning_tags or ())),
        template_marks=(opening,) if required else ("<parameter=",),
        example=f"{opening}\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n{closing}",
        legend="the tool's name for NAME, and for each argument a block with its key for KEY and its value for VALUE",
        reasoning_tags=reasoning_tags,
    )


def _keys_and_values(suffix: str = "", separator: str = "") -> TaggedValues:
    """Return the finder for calls as GLM writes them."""
    return TaggedValues(
        opening=re.compile(rf"<tool_call{suffix}>([^<>\n]+){separator}" if separator else r"\n?<tool_call>([^<>\n]+)"),
        parameter=re.compile(rf"<arg_key{suffix}>([^<>\n]+)</arg_key{suffix}>\s*<arg_value{suffix}>"),
        value_end=re.compile(rf"</arg_value{suffix}>(?=\s*(?:<arg_key{suffix}>|</tool_call{suffix}>))"),
        closing=re.compile(f"</tool_call{suffix}>"),
    )


def _invocations(prefix: str, tags: str, attributes: str = "") -> CallBlock:
    """Return the finder for blocks of calls between tags."""
    return CallBlock(
        opening=re.compile(rf"\n{{0,2}}<{tags}>"),
        closing=re.compile(rf"</{tags}>|\Z"),
        next_call=invocations(prefix, attributes).next_call,
    )


_QWEN3_CODER = _functions("tool_call", required=False)
_GLM = ToolFormat(
    find=_keys_and_values(),
    markers=("\n<tool_call>", "<tool_call>"),
    markup=("<tool_call>", "</tool_call>"),
    template_marks=("<arg_key>",),
    example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    legend=_NAMES_AND_VALUES,
)
_DEEPSEEK = ToolFormat(
    find=deepseek,
    markers=(BLOCK,),
    markup=(BLOCK, BLOCK_END, CALL, CALL_END, SEPARATOR),
    example=f"{BLOCK}{CALL}function{SEPARATOR}NAME\n```json\n{{ARGUMENTS}}\n```{CALL_END}{BLOCK_END}",
)
_DSML = ToolFormat(
    find=_invocations("｜DSML｜", "｜DSML｜(?:function|tool)_calls", ' string="(true|false)"'),
    markers=tuple(f"{line}<｜DSML｜" for line in ("\n\n", "\n", "")),
    markup=("｜DSML｜",),
    template_marks=("｜DSML｜",),
    example=(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    legend=f'{_NAMES_AND_VALUES}, which is JSON, with string="false", unless it is text',
)
_HARMONY = ToolFormat(
    find=harmony,
    markers=(START, CHANNEL, MESSAGE),
    opening_markers=("to=",),
    markup=(START, CHANNEL, MESSAGE, CONSTRAIN, END),
    reads_every_answer=True,
    template_marks=(CHANNEL,),  # other families address messages to recipients, too
    example=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}{{ARGUMENTS}}<|call|>",
)
_COHERE = _json_list(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    item='{"tool_call_id": "0", "tool_name": "NAME", "parameters": {ARGUMENTS}}',
    call_of=partial(call_of_object, name_key="tool_name"),
    reasoning_tags=("<|START_THINKING|>", "<|END_THINKING|>"),
)
_TOOL_CALLS_LIST = _json_list("<tool_calls>", "</tool_calls>")
_PYTHONIC = ToolFormat(
    find=CallBlock(
        opening=re.compile(r"(?:<\|python_start\|>|\A)\s*\["),
        closing=re.compile(r"\]\s*(?:<\|python_end\|>)?\Z"),
        next_call=next_pythonic_call,
    ),
    markers=("<|python_start|>",),
    opening_markers=("[",),
    markup=("<|python_start|>", "<|python_end|>"),
    example="[NAME(KEY=VALUE)]",
    legend=f"{_NAMES_AND_VALUES}, in Python's syntax",
)

# The first name of a format is the one that is found for a template; the least specific marks come last.
TOOL_FORMATS: dict[str, ToolFormat] = {  # vLLM's names, where it has the format
    "seed_oss": _functions("seed:tool_call", required=True, reasoning_tags=("<seed:think>", "</seed:think>")),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "glm45": _GLM,
    "glm47": _GLM,
    "llama3_json": ToolFormat(
        find=CallBlock(  # an answer that happens to be a JSON object is a call only if it has a name and parameters
            opening=re.compile(rf"(?:{re.escape(PYTHON)}|\A)\s*(?=\{{)"),
            closing=re.compile(rf"\Z|(?={re.escape(PYTHON)})"),
            next_call=partial(next_object, call_of=call_with_arguments),
        ),
        markers=(PYTHON,),
        opening_markers=("{",),
        markup=(PYTHON,),
        template_marks=(PYTHON, "<|start_header_id|>ipython"),  # without built-in tools a template prints no tag
        example='{"name": "NAME", "parameters": {ARGUMENTS}}',
    ),
    "llama4_json": ToolFormat(
        find=CallBlock(
            opening=re.compile(r"(?:(?:<\|python_start\|>)?<\|python_end\|>|<\|python_start\|>|\A)\s*(?=\{)"),
            closing=re.compile(r"(?:<\|python_end\|>)?\Z"),
            next_call=partial(next_object, call_of=call_with_arguments),
        ),
        markers=("<|python_start|>", "<|python_end|>"),
        opening_markers=("{",),
        markup=("<|python_start|>", "<|python_end|>"),
        example='{"name": "NAME", "parameters": {ARGUMENTS}}',
    ),
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "mistral": ToolFormat(
        find=CallBlock(
            opening=re.compile(re.escape(TOOL_CALLS)),
            closing=re.compile(rf"\Z|(?={re.escape(TOOL_CALLS)})"),
            next_call=next_mistral_call,
        ),
        markers=(TOOL_CALLS,),
        markup=(TOOL_CALLS, "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        example='[TOOL_CALLS][{"name": "NAME", "arguments": {ARGUMENTS}}]',
        reasoning_tags=("[THINK]", "[/THINK]"),
    ),
    "deepseek_r1": _DEEPSEEK,
    "r1": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _DSML,
    "deepseek_v4": _DSML,
    "harmony": _HARMONY,
    "openai": _HARMONY,
    "muse_glimmer": ToolFormat(
        find=muse,
        markers=(START, MESSAGE),
        opening_markers=("to=",),
        markup=(START, MESSAGE, "<|eom|>"),
        reads_every_answer=True,
        template_marks=("<atem:invoke",),
        example=(
            ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="KEY">VALUE'
            "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
        ),
        legend="the tool's name for NAME, and for each argument a line with its key for KEY and its value for VALUE",
    ),
    "minimax_m2": ToolFormat(
        find=_invocations("", "minimax:tool_call"),
        markers=tuple(f"{line}<minimax:tool_call>" for line in ("\n\n", "\n", "")),
        markup=("<minimax:tool_call>", "</minimax:tool_call>"),
        example=(
            '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n'
            "</minimax:tool_call>"
        ),
        legend=_NAMES_AND_VALUES,
    ),
    "kimi_k2": ToolFormat(
        find=CallBlock(
            opening=re.compile(r"<\|tool_calls_section_begin\|>"),
            closing=re.compile(r"<\|tool_calls_section_end\|>|\Z"),
            next_call=next_kimi_call,
        ),
        markers=("<|tool_calls_section_begin|>",),
        markup=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        example=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{ARGUMENTS}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "gemma4": ToolFormat(
        find=CallBlock(
            opening=re.compile(r"<\|tool_call>(?=call:)"),
            closing=re.compile(r"<tool_call\|>|\Z"),
            next_call=next_gemma_call,
        ),
        markers=("<|tool_call>",),
        markup=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        template_marks=("<|tool_call>call:",),
        example='<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>',
        legend=_NAMES_AND_VALUES,
        reasoning_tags=("<|channel>thought\n", "<channel|>"),
    ),
    "lfm2": ToolFormat(
        find=CallBlock(
            opening=re.compile(r"\n?<\|tool_call_start\|>\s*\["),
            closing=re.compile(r"\]\s*(?:<\|tool_call_end\|>|\Z)"),
            next_call=next_pythonic_call,
        ),
        markers=("\n<|tool_call_start|>", "<|tool_call_start|>"),
        markup=("<|tool_call_start|>", "<|tool_call_end|>"),
        template_marks=("<|tool_call_start|>", "<|tool_list_start|>"),
        example="<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
        legend=f"{_NAMES_AND_VALUES}, in Python's syntax",
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "granite": _json_list("<|tool_call|>", "<|/tool_call|>"),
    "phi4_mini_json": ToolFormat(
        find=CallBlock(opening=re.compile(r"functools\["), closing=re.compile(r"\]"), next_call=next_object),
        markers=("functools[",),
        example='functools[{"name": "NAME", "arguments": {ARGUMENTS}}]',
    ),
    "hunyuan_a13b": _TOOL_CALLS_LIST,
    "jamba": _TOOL_CALLS_LIST,
    "hy_v3": ToolFormat(
        find=CallBlock(
            opening=re.compile(r"\n?<tool_calls:opensource>"),
            closing=re.compile(r"</tool_calls:opensource>|\Z"),
            next_call=_keys_and_values(":opensource", "<tool_sep:opensource>").next_call,
        ),
        markers=("\n<tool_calls:opensource>", "<tool_calls:opensource>"),
        markup=tuple(
            f"<{tag}:opensource>"
            for name in ("tool_calls", "tool_call", "arg_key", "arg_value", "think")
            for tag in (name, f"/{name}", "tool_sep")
        ),
        template_marks=("tool_sep",),
        example=(
            "<tool_calls:opensource>\n<tool_call:opensource>NAME<tool_sep:opensource>\n<arg_key:opensource>KEY"
            "</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n</tool_call:opensource>\n"
            "</tool_calls:opensource>"
        ),
        legend=_NAMES_AND_VALUES,
        reasoning_tags=("<think:opensource>", "</think:opensource>"),
    ),
    "apertus": _json_list(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        item='{"NAME": {ARGUMENTS}}',
        call_of=call_of_pair,
    ),
    "hermes": _HERMES,
    "qwen": _HERMES,
    "granite4": _HERMES,
}
