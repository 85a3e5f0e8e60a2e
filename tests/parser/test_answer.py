from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from tokenizers import AddedToken

from rllm.parser.answer import Answer, AnswerReader, VisibleText
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import tool_parser


def read(tokenizer: Any, format_name: str, text: str) -> tuple[Answer, list[VisibleText]]:
    """Return an answer in a format whose markers are special tokens: whole, and as it was streamed."""
    tokenizer, parser = deepcopy(tokenizer), tool_parser(format_name)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (*parser.markup, "<|call|>", "<|return|>")])
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = TextDecoder(tokenizer, tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"]), parser.markup)
    reader = AnswerReader(decoder, prompt_ids=[], stop=(), tool_parser=parser)
    streamed = [reader.show([token]) for token in ids]
    answer = reader.read(ids)
    return answer, [*streamed, reader.rest(VisibleText(answer.reasoning, answer.content))]


def test_harmony_channels_become_reasoning_and_content(tokenizer: Any) -> None:
    answer, streamed = read(
        tokenizer,
        "harmony",
        "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
    )
    assert (answer.reasoning, answer.content, answer.tool_calls) == ("two and two", "four", [])
    assert "".join(shown.content for shown in streamed) == "four"
    assert "".join(shown.reasoning for shown in streamed) == "two and two"


def test_reasoning_is_streamed_before_the_content(tokenizer: Any) -> None:
    answer, streamed = read(tokenizer, "hermes", "<think>\ntwo and two\n</think>\n\nfour")
    assert (answer.reasoning, answer.content) == ("two and two", "four")
    assert "".join(shown.content for shown in streamed) == "four"
    thoughts = [place for place, shown in enumerate(streamed) if shown.reasoning]
    assert "".join(streamed[place].reasoning for place in thoughts) == "two and two"
    assert len(thoughts) > 1
    assert thoughts[-1] < min(place for place, shown in enumerate(streamed) if shown.content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":  1}<|call|>'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x":  1}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x":  1}'),
    ],
)
def test_calls_written_with_special_tokens_are_found(tokenizer: Any, name: str, text: str) -> None:
    answer, streamed = read(tokenizer, name, text)
    assert answer.tool_calls[0]["function"] == {"name": "f", "arguments": '{"x":  1}'}
    assert answer.content == ""
    assert set(streamed) == {VisibleText()}
