"""Conversations of several turns as one sequence of sampled tokens, and answers parsed, for each template."""

from __future__ import annotations

from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser
from rllm.parser.answer import AnswerReader
from rllm.parser.continuation import Continuation
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import chosen_format, parser_of_answer, tool_format_of_template, tool_parser
from rllm.types import Message

from .conftest import template_text, tokenizer_for
from .test_masks import ANSWER, CALL, QUESTION, REFUSED, RESULT, TOOLS

pytestmark = pytest.mark.models

AGAIN: Message = {"role": "user", "content": "Sure?"}
YES: Message = {"role": "assistant", "content": "Yes."}
CONVERSATIONS: dict[str, list[Message]] = {
    "plain": [QUESTION, ANSWER, AGAIN, YES, AGAIN],
    "system": [{"role": "system", "content": "Be kind."}, QUESTION, ANSWER, AGAIN, YES, AGAIN],
    "reasoning": [
        QUESTION,
        {**ANSWER, "reasoning_content": "two, two"},
        AGAIN,
        {**YES, "reasoning_content": "sure"},
        AGAIN,
    ],
    "tool": [QUESTION, CALL, RESULT, ANSWER, AGAIN, CALL, RESULT],
}

FORMATS = {
    "deepseek": "deepseek_r1",
    "diffusion_gemma": "gemma4",
    "gemma4": "gemma4",
    "lfm2": "lfm2",
    "glm": "glm45",
    "gptoss": "harmony",
    "llama3_": "llama3_json",
    "muse": "muse_glimmer",
    "nemotron": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen2_5_vl": None,  # prints no calls
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
}
"""Formats of calls, by prefix of the template's name; the others print none."""

REWRITES = {
    "deepseek": "leaves </think> out of earlier answers",
    "gptoss": "ends earlier answers with <|end|>, which were sampled with <|return|>",
    "nemotron": "prints the tags of earlier answers without the line break that the prompt has",
    "qwen3": "leaves the empty tags out of earlier answers",
}
"""Templates that print an earlier answer otherwise than it was sampled, so that its tokens must be kept as they are."""


def sampled(parser: ChatTemplateParser, messages: list[Message]) -> list[int]:
    """Return a model's tokens for the last message; a call is written as in a first turn."""
    is_call = messages[-1] is CALL
    _, ids, mask = parser.tokenize_and_mask([QUESTION, CALL] if is_call else messages, TOOLS if is_call else None)
    return [token for token, learned in zip(ids, mask, strict=True) if learned]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversation_becomes_one_sequence(template: str, tokenizer: Any, kind: str) -> None:
    messages, tools = CONVERSATIONS[kind], TOOLS if kind == "tool" else None
    parser = ChatTemplateParser(tokenizer)
    if words := REFUSED.get((template, kind)):
        with pytest.raises(ConfigError, match=words):
            parser.tokenize_and_mask(messages[:-1], tools)
        return
    continuation = Continuation(tokenizer, parser.template)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    ids = parser.template.render(messages[: places[0]], tools)
    num_known = 0
    for place in places:
        if num_known:
            longer = continuation.prompt_ids(ids, messages[:place], num_known, tools)
            assert longer[: len(ids)] == ids
            ids = longer
        ids, num_known = [*ids, *sampled(parser, messages[: place + 1])], place + 1
    ids = continuation.prompt_ids(ids, messages, num_known, tools)
    if kind == "tool" and template.startswith("deepseek"):
        # The template renders a second call without its beginning: it is not trained from messages, but continued.
        with pytest.raises(ConfigError, match="append-only"):
            parser.parse(messages, True, True, tools, accumulate_reasoning=True)
        return
    whole = parser.parse(messages, True, True, tools, accumulate_reasoning=True)
    assert tokenizer.decode(ids) == whole
    if kind != "reasoning" and not any(template.startswith(start) for start in REWRITES):
        assert whole == parser.template.render_text(messages, tools)


def format_of(template: str) -> str | None:
    starts = [start for start in FORMATS if template.startswith(start)]
    return FORMATS[max(starts, key=len)] if starts else None


def test_tool_call_format_is_detected_or_none(template: str) -> None:
    assert tool_format_of_template(template_text(template)) == format_of(template)


def read(template: str, messages: list[Message], tools: Any) -> Any:
    tokenizer = tokenizer_for(template)
    parser = ChatTemplateParser(tokenizer)
    prompt, ids, mask = parser.tokenize_and_mask(messages, tools)
    form = tool_parser(chosen_format(None, template_text(template)))
    decoder = TextDecoder(tokenizer, markup=form.markup)
    reader = AnswerReader(decoder, prompt_ids=prompt, stop=(), tool_parser=parser_of_answer(form, tools, "auto"))
    return reader.read([token for token, learned in zip(ids, mask, strict=True) if learned])


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
def test_sampled_answer_is_parsed_as_its_content(template: str, tools: Any) -> None:
    answer = read(template, [QUESTION, ANSWER], tools)
    assert (answer.content.strip(), answer.reasoning, answer.tool_calls) == ("It is 4.", "", [])


def test_sampled_call_is_parsed(template: str) -> None:
    if format_of(template) is None or template == "lfm2":  # which prints tools, but no calls
        return
    answer = read(template, [QUESTION, CALL], TOOLS)
    assert answer.content.strip() == ""
    (call,) = answer.tool_calls
    assert call["function"] == CALL["tool_calls"][0]["function"]
