"""Random tool calls as chat templates render them, for our parser and for others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rllm.parser.chat_template import ChatTemplate
from rllm.parser.template_shape import BESIDE_CALLS, CALLS, FURTHER_CALLS
from rllm.parser.tool_parser import tool_format_of_template
from rllm.types import Message

from .conftest import template_folder, tokenizer_for
from .survey import FAMILIES

TEMPLATES = [name for names in FAMILIES.values() for name in names]
QUESTION: Message = {"role": "user", "content": "Look."}
TYPES = {
    "text": "string",
    "count": "integer",
    "share": "number",
    "sure": "boolean",
    "items": "array",
    "more": "object",
    "maybe": ["integer", "null"],
}
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
    "it's",
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
TEXT = "I look it up."
ELSEWHERE = {
    "axolotl/llama4": "prints text beside calls as code",
    "trl/gptoss": "prints text beside calls as reasoning",
    "llama.cpp/openai-gpt-oss-120b": "prints text beside calls as reasoning",
}


@dataclass(frozen=True, kw_only=True)
class PrintedCalls:
    """An answer with calls as a template renders it."""

    message: Message
    calls: list[tuple[str, Any]]
    """Names and arguments."""
    ids: list[int]
    prompt_ids: list[int]


def arguments(source: random.Random) -> dict[str, Any]:
    """Return arguments of a random selection of kinds."""

    def text() -> str:
        return " ".join(source.sample(WORDS, 2))

    made: dict[str, Any] = {
        "text": text(),
        "count": source.choice([source.randrange(-5, 99), 2_000_000, 10**20]),
        "share": source.choice([0.5, -2.25, 1e-5]),
        "sure": source.random() < 0.5,
        "items": [text(), source.randrange(9), [source.random() < 0.5]],
        "more": {"name": text(), "inner": {"list": [1, 2.5], "none": None}},
        "maybe": source.choice([None, 7]),
    }
    return {key: made[key] for key in made if key == "text" or source.random() < 0.6}


def template_with_calls(name: str) -> ChatTemplate:
    """Return a template that prints calls in a known format; skip the test for another."""
    if template_folder() is None:
        pytest.skip("run `make test-models`")
    template = ChatTemplate(tokenizer_for(name))
    if CALLS in template.shape.lost or tool_format_of_template(template.text) is None:
        pytest.skip("prints no calls")
    return template


def printed_calls(name: str, number: int) -> Iterator[PrintedCalls]:
    """Yield random answers with calls, always the same ones for a template that prints calls."""
    template, source = ChatTemplate(tokenizer_for(name)), random.Random(0)
    texts = [""] if name in ELSEWHERE or BESIDE_CALLS in template.shape.lost else ["", TEXT]
    for _ in range(number):
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
        ids, prompt_ids = template.printed_answer(QUESTION, message, TOOLS)
        yield PrintedCalls(message=message, calls=calls, ids=ids, prompt_ids=prompt_ids)
