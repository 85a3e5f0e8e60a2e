"""Calls of each family, as its template renders them, are parsed exactly; random values, from a fixed seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser.answer import AnswerReader
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import chosen_format, tool_parser

from .calls import QUESTION, TEMPLATES, TOOLS, printed_calls, template_with_calls
from .conftest import template_text, tokenizer_for

pytestmark = pytest.mark.models

ASKS_ALWAYS = {"llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use", "axolotl/command_a_tool_use"}
"""Templates that print the prompt of a next answer at the end of every conversation."""


def read(name: str, ids: Sequence[int], prompt_ids: Sequence[int]) -> Any:
    """Return the answer as read from the tokens that its template prints."""
    format_ = tool_parser(chosen_format(None, template_text(name)))
    decoder = TextDecoder(tokenizer_for(name), markup=format_.markup)
    reader = AnswerReader(decoder, prompt_ids=prompt_ids, stop=(), tool_parser=format_.for_tools(TOOLS))
    return reader.read(ids)


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]


def content_of(name: str, answer: Any) -> str:
    """Return the content without what the template prints around it, and the prompt of a next answer."""
    content = answer.content.removeprefix("</think>")  # from a prompt that opens <think>
    return (content.replace("<|START_THINKING|><|END_THINKING|>", "") if name in ASKS_ALWAYS else content).strip()


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_calls_are_parsed_as_written(name: str) -> None:
    template_with_calls(name)
    for printed in printed_calls(name, 12):
        answer = read(name, printed.ids, printed.prompt_ids)
        assert calls_of(answer) == printed.calls
        assert content_of(name, answer) == printed.message["content"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_before_a_call_is_parsed(name: str) -> None:
    template = template_with_calls(name)
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": '{"text": "figs"}'}}
    message = {"role": "assistant", "content": "", "reasoning_content": "I count them.", "tool_calls": [call]}
    try:
        answer = read(name, *template.printed_answer(QUESTION, message, TOOLS))
    except ConfigError:
        pytest.skip("refuses reasoning")
    assert calls_of(answer) == [("look_up", {"text": "figs"})]
    assert answer.reasoning.strip() in ("", "I count them.")
    assert content_of(name, answer) == ""
