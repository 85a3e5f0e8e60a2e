from __future__ import annotations

from collections.abc import Callable

import pytest

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser, QwenToolParser, R1ToolParser, ToolCall, ToolParser, get_tool_parser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_calls_are_parsed() -> None:
    assert QwenToolParser().parse(f"Let me see.\n{CALL}") == [ToolCall("add", {"a": 1, "b": [2]})]
    assert QwenToolParser().parse("none") == []
    assert ToolCall("add", {"a": 1}).to_dict() == {"name": "add", "arguments": {"a": 1}}


def test_call_in_the_reasoning_is_ignored() -> None:
    assert QwenToolParser().parse(f"<think>\nmaybe {CALL}\n</think>\n\nNo.") == []


def test_call_in_reasoning_opened_by_the_prompt_is_ignored() -> None:
    thought = CALL.replace("add", "remove")
    assert QwenToolParser().parse(f"maybe {thought}, but no.\n</think>\n\n{CALL}") == [
        ToolCall("add", {"a": 1, "b": [2]})
    ]


def test_parser_classes_are_found_by_name() -> None:
    assert get_tool_parser("qwen") is QwenToolParser
    assert get_tool_parser("r1") is R1ToolParser
    assert get_tool_parser("mistral")().parse("[TOOL_CALLS]f[ARGS]{}") == [ToolCall("f", {})]
    with pytest.raises(ConfigError, match="did you mean 'qwen'"):
        get_tool_parser("qwenn")


def test_parser_is_chosen_by_the_template_of_a_tokenizer(parser_of: Callable[..., ChatTemplateParser]) -> None:
    assert isinstance(ToolParser.get_parser(parser_of("qwen").tokenizer), QwenToolParser)
    assert isinstance(ToolParser.get_parser(parser_of("deepseek").tokenizer), R1ToolParser)
    with pytest.raises(ConfigError, match="get_tool_parser"):
        ToolParser.get_parser(parser_of("{{ messages[0].content }}").tokenizer)


def test_subclass_may_parse_its_own_format() -> None:
    class Shouted(ToolParser):
        def parse(self, text: str) -> list[ToolCall]:
            return [ToolCall(word.lower()) for word in text.split() if word.isupper()]

    assert Shouted().parse("please STOP now") == [ToolCall("stop")]


@pytest.mark.parametrize("name", ["qwen", "r1", "llama3_json", "mistral", "harmony"])
def test_prompt_shows_tools_and_a_parsable_call(name: str) -> None:
    parser = get_tool_parser(name)()
    prompt = parser.get_tool_prompt('[{"name": "add"}]')
    assert '[{"name": "add"}]' in prompt
    example = prompt.rpartition("for {ARGUMENTS}:\n")[2].replace("{ARGUMENTS}", '{"a": 1}').replace("NAME", "add")
    assert parser.parse(example.rstrip("\n")) == [ToolCall("add", {"a": 1})]
