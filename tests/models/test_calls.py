"""Calls of each family, as its template prints them, are read as what they are; random values, from a fixed seed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser.answer import AnswerReader
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.decoding import TextDecoder
from rllm.parser.template_shape import BESIDE_CALLS, CALLS, FURTHER_CALLS
from rllm.parser.tool_parser import chosen_format, tool_format_of_template, tool_parser

from .conftest import template_folder, tokenizer_for
from .survey import FAMILIES

pytestmark = pytest.mark.models

TEMPLATES = [name for names in FAMILIES.values() for name in names]
TYPES = {"text": "string", "count": "integer", "share": "number", "sure": "boolean", "items": "array", "more": "object"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": "A value."} for key, kind in TYPES.items()},
                "required": ["text"],
            },
        },
    }
    for name in ("look_up", "add-2")
]
WORDS = [
    "figs",
    "café",
    "日本",
    "🎉",
    'a "quoted" word',
    "it is",
    "1",
    "true",
    "{",
    "]",
    "\\d",
    "two\nlines",
    "<b>",
    "&",
    "a, b",
    "k: v",
]
ASKS_ALWAYS = {"llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use", "axolotl/command_a_tool_use"}
"""Templates that print the prompt of a next answer at the end of every conversation."""
ELSEWHERE = {
    "axolotl/llama4": "prints text beside calls as code",
    "trl/gptoss": "prints text beside calls as reasoning",
    "llama.cpp/openai-gpt-oss-120b": "prints text beside calls as reasoning",
}


def arguments(source: random.Random) -> dict[str, Any]:
    """Return arguments of some of the kinds."""

    def text() -> str:
        return " ".join(source.sample(WORDS, 2))

    made: dict[str, Any] = {
        "text": text(),
        "count": source.randrange(-5, 99),
        "share": source.choice([0.5, -2.25, 1e-5]),
        "sure": source.random() < 0.5,
        "items": [text(), source.randrange(9), [source.random() < 0.5]],
        "more": {"name": text(), "inner": {"list": [1, 2.5]}},
    }
    return {key: made[key] for key in made if key == "text" or source.random() < 0.6}


def read_back(name: str, answer: dict[str, Any]) -> Any:
    """Return the answer as it is read from the tokens of its template's print."""
    tokenizer = tokenizer_for(name)
    template = ChatTemplate(tokenizer)
    format_ = tool_parser(chosen_format(None, template.text))
    ids, prompt_ids = template.printed_answer({"role": "user", "content": "Look."}, answer, TOOLS)
    decoder = TextDecoder(tokenizer, markup=format_.markup)
    reader = AnswerReader(decoder, prompt_ids=prompt_ids, stop=(), tool_parser=format_.for_tools(TOOLS))
    return reader.read(ids)


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]


def content_of(name: str, answer: Any) -> str:
    """Return the content without what the template prints around it, and the prompt of a next answer."""
    content = answer.content.removeprefix("</think>")  # of a prompt that opens <think>, which no answer's print has
    return (content.replace("<|START_THINKING|><|END_THINKING|>", "") if name in ASKS_ALWAYS else content).strip()


def template_with_calls(name: str) -> ChatTemplate:
    """Return a template that prints calls in a known format; skip the test for another."""
    if template_folder() is None:
        pytest.skip("run `make test-models`")
    template = ChatTemplate(tokenizer_for(name))
    if CALLS in template.shape.lost or tool_format_of_template(template.text) is None:
        pytest.skip("prints no calls")
    return template


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_calls_are_read_as_they_were_made(name: str) -> None:
    template = template_with_calls(name)
    source = random.Random(0)
    texts = [""] if name in ELSEWHERE or BESIDE_CALLS in template.shape.lost else ["", "I look it up."]
    for _ in range(12):
        most = 1 if FURTHER_CALLS in template.shape.lost else 2  # DeepSeek R1's ends the block after the second
        calls = [(source.choice(["look_up", "add-2"]), arguments(source)) for _ in range(source.randint(1, most))]
        message = {
            "role": "assistant",
            "content": source.choice(texts),
            "tool_calls": [
                {"id": f"call0000{n}", "type": "function", "function": {"name": f, "arguments": json.dumps(values)}}
                for n, (f, values) in enumerate(calls)
            ],
        }
        answer = read_back(name, message)
        assert calls_of(answer) == calls
        assert content_of(name, answer) == message["content"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_before_a_call_is_read_as_such(name: str) -> None:
    template_with_calls(name)
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": '{"text": "figs"}'}}
    message = {"role": "assistant", "content": "", "reasoning_content": "I count them.", "tool_calls": [call]}
    try:
        answer = read_back(name, message)
    except ConfigError:
        pytest.skip("refuses reasoning")
    assert calls_of(answer) == [("look_up", {"text": "figs"})]
    assert answer.reasoning.strip() in ("", "I count them.")
    assert content_of(name, answer) == ""
