"""All content of a request is in the prompt, or is reported; checked by markers, not by the code that chooses formats."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.continuation import Continuation
from rllm.parser.tool_parser import tool_parser
from rllm.parser.tool_prompt import TemplateChoice

pytestmark = pytest.mark.models

NO_TOOLS = {
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "llama3", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
NO_SYSTEM = {"gemma"}
NO_CALLS = NO_TOOLS - {"deepseek_r1_distill", "deepseekv3"} | {"lfm2"}
NO_RESULTS = {"cohere2", "phi3", "phi3_5"}
STRICT = {"cohere", "gemma", "gemma3", "llava_next"} | NO_RESULTS
"""Templates that reject a tool's result, because roles must alternate, or that print none, which is an error here."""
NO_TEXT_BESIDE_CALLS = {"deepseek_r1_distill", "llama3_1", "llama3_2", "muse_glimmer"}
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}

SYSTEM: dict[str, Any] = {"role": "system", "content": "qs-system"}
QUESTION: dict[str, Any] = {"role": "user", "content": "qs-question"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "qs-answer"}
LATER: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "qs-later"}]}
ARGUMENTS = '{"qs_key": "qs-value"}'
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "qs_name", "arguments": ARGUMENTS}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdefghi", "content": "qs-result"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "qs_name",
            "description": "qs-description",
            "parameters": {
                "type": "object",
                "properties": {"qs_argument": {"type": "string", "description": "A text."}},
            },
        },
    }
]


def in_order(text: str, *marks: str) -> bool:
    places = [text.find(mark) for mark in marks]
    return -1 not in places and places == sorted(places)


def test_plain_conversation_is_rendered_in_order(template: str, tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    assert chat.lost([QUESTION, ANSWER, LATER]) == ()
    assert in_order(chat.render_text([QUESTION, ANSWER, LATER]), "qs-question", "qs-answer", "qs-later")
    if template in NO_SYSTEM:
        with pytest.raises(ConfigError, match=r"messages\[0\] \(role 'system'\).*System role not supported"):
            chat.render([SYSTEM, QUESTION])
    else:
        assert in_order(chat.render_text([SYSTEM, QUESTION, ANSWER, LATER]), "qs-system", "qs-question", "qs-answer")


def test_tools_are_rendered_or_reported(template: str, tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    text = chat.render_text([QUESTION], TOOLS)
    printed = [mark in text for mark in ("qs_name", "qs-description", "qs_argument")]
    assert printed == [template not in NO_TOOLS] * 3
    assert chat.lost([QUESTION], TOOLS) == (("tools",) if template in NO_TOOLS else ())


def test_calls_and_results_are_rendered_or_reported(template: str, tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    messages = [QUESTION, CALL, RESULT]
    lost = set(chat.lost(messages))
    assert ("tool calls" in lost) == (template in NO_CALLS)
    assert ("tool results" in lost) == (template in NO_RESULTS)
    if template in STRICT:
        with pytest.raises(ConfigError, match=r"messages\[2\] \(role 'tool'\).*template of .*model\.tool_prompt"):
            chat.render(messages)
        return
    text = chat.render_text(messages)
    marks = [] if template in NO_CALLS else ["qs_name", "qs_key", "qs-value"]
    assert in_order(text, "qs-question", *marks, "qs-result")
    assert "qs-value" not in text or template not in NO_CALLS


def test_text_next_to_calls_is_rendered_or_reported(template: str, tokenizer: Any) -> None:
    if template in NO_CALLS:
        return
    chat = ChatTemplate(tokenizer)
    messages = [QUESTION, {**CALL, "content": "qs-beside"}, RESULT]
    text = chat.render_text(messages)
    assert in_order(text, "qs_name", "qs-value", "qs-result")
    assert ("qs-beside" in text) == (template not in NO_TEXT_BESIDE_CALLS)
    assert chat.lost(messages) == (("text alongside tool calls",) if template in NO_TEXT_BESIDE_CALLS else ())


def test_all_calls_of_an_answer_are_rendered_or_reported(template: str, tokenizer: Any) -> None:
    if template in NO_CALLS:
        return
    chat = ChatTemplate(tokenizer)
    second = {
        "id": "second123",
        "type": "function",
        "function": {"name": "qs_name", "arguments": '{"qs_key": "qs-more"}'},
    }
    messages = [QUESTION, {**CALL, "tool_calls": [*CALL["tool_calls"], second]}, RESULT]
    messages.append({"role": "tool", "tool_call_id": "second123", "content": "qs-other"})
    assert ("further tool calls of an answer" in chat.shape.lost) == (template in ONE_CALL)
    if template in ONE_CALL - {"gptoss"}:
        with pytest.raises(ConfigError, match=r"messages\[1\].*single tool-calls"):
            chat.render(messages)
    elif template not in ONE_CALL:
        assert in_order(chat.render_text(messages), "qs-value", "qs-more", "qs-result", "qs-other")


def test_call_without_arguments_is_rendered(template: str, tokenizer: Any) -> None:
    if template not in NO_CALLS:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "qs_name", "arguments": ""}}
        assert "qs_name" in ChatTemplate(tokenizer).render_text([QUESTION, {**CALL, "tool_calls": [call]}, RESULT])


def test_reasoning_is_rendered_at_most_once(template: str, tokenizer: Any) -> None:
    thought = {**ANSWER, "reasoning": "qs-thought"}
    assert ChatTemplate(tokenizer).render_text([QUESTION, thought], add_generation_prompt=False).count("qs-thought") < 2


def test_tool_prompt_lets_every_model_use_tools(template: str, tokenizer: Any) -> None:
    tokenizer = deepcopy(tokenizer)
    plain = ChatTemplate(tokenizer).render_text([QUESTION, ANSWER, LATER])
    TemplateChoice(tool_prompt="hermes").apply(tokenizer)
    chat = ChatTemplate(tokenizer)
    assert chat.render_text([QUESTION, ANSWER, LATER]) == plain
    written = f'<tool_call>\n{{"name": "qs_name", "arguments": {ARGUMENTS}}}\n</tool_call>'
    messages = [SYSTEM, QUESTION, CALL, RESULT, ANSWER, LATER]
    assert chat.lost(messages, TOOLS) == ()
    text = chat.render_text(messages, TOOLS)
    assert in_order(text, "qs-system", "qs-description", "qs-question", written, "qs-result", "qs-answer", "qs-later")


def test_turns_with_the_tool_prompt_continue_sampled_tokens(template: str, tokenizer: Any) -> None:
    tokenizer = deepcopy(tokenizer)
    TemplateChoice(tool_prompt="hermes").apply(tokenizer)
    chat = ChatTemplate(tokenizer)
    sampled = f'Hm.\n<tool_call>\n{{"name": "qs_name", "arguments": {ARGUMENTS.replace(" ", "  ")}}}\n</tool_call>'
    parsed = tool_parser("hermes").parse(sampled)
    answer = {"role": "assistant", "content": parsed.content, "tool_calls": parsed.tool_calls}
    result = {**RESULT, "tool_call_id": parsed.tool_calls[0]["id"]}
    known = [*chat.render([SYSTEM, QUESTION], TOOLS), *tokenizer.encode(sampled, add_special_tokens=False)]
    ids = Continuation(tokenizer, chat).prompt_ids(known, [SYSTEM, QUESTION, answer, result], 3, TOOLS)
    assert ids[: len(known)] == known
    assert "qs-result" in tokenizer.decode(ids[len(known) :])
