"""Learned spans against TRL's training templates, which mark answers with `{% generation %}` themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser
from rllm.parser.chat_template import ChatTemplate
from rllm.types import Message

from .conftest import template_folder, tokenizer_for

pytestmark = pytest.mark.models

QUESTION: Message = {"role": "user", "content": "What is 2 + 2?"}
ANSWER: Message = {"role": "assistant", "content": "It is 4."}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "4"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
CONVERSATIONS: dict[str, list[Message]] = {
    "plain": [QUESTION, ANSWER],
    "system": [{"role": "system", "content": "Be kind."}, QUESTION, ANSWER],
    "reasoning": [QUESTION, {**ANSWER, "reasoning_content": "two, two"}],
    "turns": [QUESTION, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}],
    "tool": [QUESTION, CALL, RESULT, ANSWER],
}

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1": "<｜end▁of▁sentence｜> <｜tool▁call▁end｜>",  # a single call has only the second
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|> <|tool_response>",  # where a call ends, so that its result can follow
    "gemma4": "<turn|> <|tool_response>",
    "gemma": "<end_of_turn>",
    "glm4moe": "<|user|> <|observation|>",  # the template prints no end: the model begins the next turn
    "gptoss": "<|return|> <|call|>",
    "idefics3": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llava": "</s>",
    "muse": "<|eot|>",
    "phi3": "<|end|>",
    "": "<|im_end|>",
}
"""Tokens that end an answer, by prefix of the template's name."""

REFUSED = {
    ("cohere", "tool"): "roles must alternate",
    ("cohere2", "tool"): "prints no tool results",
    ("gemma", "system"): "System role not supported",
    ("gemma", "tool"): "roles must alternate",
    ("gemma3", "tool"): "roles must alternate",
    ("llava_next", "tool"): "Only user and assistant roles",
    ("phi3", "tool"): "prints no tool results",
    ("phi3_5", "tool"): "prints no tool results",
}
"""Conversations that a template rejects, with its message."""

DIFFERENT = {
    # The prompt opens <think>, so an answer without reasoning closes it first; the reference never opens it.
    ("deepseek", "plain"): ["\n</think>\n\nIt is 4."],
    ("deepseek", "system"): ["\n</think>\n\nIt is 4."],
    ("deepseek", "reasoning"): ["two, two\n</think>\n\nIt is 4."],
    ("deepseek", "turns"): ["\n</think>\n\nIt is 4.", "\n</think>\n\nYes."],
    ("deepseek", "tool"): [
        "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 2, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "It is 4.",
    ],
    # As above; the template leaves out what ends a block of one call, and the turn.
    ("deepseek_r1", "tool"): [
        "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 2, "b": 2}\n```',
        "It is 4.",
    ],
    # The token with which Gemma 4 hands over to a tool is sampled. After a result this template opens no answer; the
    # header that it prints before one is then trained, since an engine's prompt does not have it.
    ("diffusion_gemma", "tool"): [
        "<|tool_call>call:add{a:2,b:2}<tool_call|>",
        "<|turn>model\nIt is 4.",
    ],
    # <|return|> is sampled at the end of every final answer; the template prints <|end|> for those in the past.
    ("gptoss", "turns"): [f"<|channel|>final<|message|>{text}" for text in ("It is 4.", "Yes.")],
}
"""Texts, without their ends, that are trained differently from the reference, and why."""

THOUGHT = "<think>\ntwo, two\n</think>\n\n"
"""Reasoning as it is trained where a template leaves it out; the reference trains none then."""


def learned(name: str, conversation: str) -> list[str]:
    """Return the texts of a conversation that are trained."""
    messages = CONVERSATIONS[conversation]
    parser = ChatTemplateParser(tokenizer_for(name))
    prompt, ids, mask = parser.tokenize_and_mask_cumulative(messages, tools_of(messages))
    return masked_texts(name, [*prompt, *ids], [*([0] * len(prompt)), *mask])


def tools_of(messages: Sequence[Message]) -> Any:
    return TOOLS if RESULT in messages else None


def masked_texts(name: str, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer_for(name).decode([token for token, _ in run]) for kept, run in runs if kept]


def by_name(table: Mapping[Any, Any], name: str, conversation: str) -> Any:
    """Return the entry whose key is the longest prefix of the template's name."""
    entries = [
        (start, value) for (start, kind), value in table.items() if kind == conversation and name.startswith(start)
    ]
    return max(entries, default=("", None), key=lambda entry: len(entry[0]))[1]


def ends_of(name: str) -> list[str]:
    return next(ends.split() for start, ends in ENDS.items() if name.startswith(start))


def without_end(name: str, text: str) -> str:
    return text.removesuffix(next((end for end in ends_of(name) if text.endswith(end)), ""))


def reference(name: str, conversation: str) -> list[str] | None:
    """Return the texts that TRL's training template marks; None where TRL has none.

    The part of an answer that the generation prompt has, and what follows the end of the turn, are left out.
    """
    folder = template_folder()
    assert folder is not None
    path = folder / "trl" / f"{name}_training.jinja"
    if not path.exists():
        return None
    tokenizer = deepcopy(tokenizer_for(name))
    tokenizer.chat_template = path.read_text()
    messages = [shaped(message, name) for message in CONVERSATIONS[conversation]]
    marked = tokenizer.apply_chat_template(
        messages, tools=tools_of(CONVERSATIONS[conversation]), return_assistant_tokens_mask=True, return_dict=True
    )
    request = ChatTemplate(tokenizer_for(name)).render_text([QUESTION])
    texts = masked_texts(name, marked["input_ids"], marked["assistant_masks"])
    return [written_after(request, text) for text in texts]


def shaped(message: Message, name: str) -> Message:
    """Return a message in the shape that the family's template reads."""
    message = deepcopy(message)
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    for call in message.get("tool_calls", ()) if name != "deepseekv3" else ():
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if name in ("idefics3", "llava_next", "smolvlm"):
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


def written_after(request: str, text: str) -> str:
    """Return an answer's text without the part of it that ends the generation prompt."""
    prompts = (request, request.rstrip())
    lengths = (
        length for prompt in prompts for length in range(len(prompt), 0, -1) if text.startswith(prompt[-length:])
    )
    return text[next(lengths, 0) :].removesuffix("<|endoftext|>").rstrip()


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_trained_spans_equal_the_reference(template: str, conversation: str) -> None:
    if words := REFUSED.get((template, conversation)):
        with pytest.raises(ConfigError, match=words):
            learned(template, conversation)
        return
    texts = learned(template, conversation)
    for text in texts:
        assert text.endswith(tuple(ends_of(template))), "the token that ends an answer is learned last"
    expected = by_name(DIFFERENT, template, conversation) or reference(template, conversation)
    if expected is None:  # TRL does not train this one
        expected = texts
    bare = [without_end(template, text) for text in expected]
    if conversation == "reasoning" and "two, two" not in "".join(bare):
        bare[-1] = THOUGHT + bare[-1]
    assert [without_end(template, text) for text in texts] == bare


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_single_answer_is_trained_like_the_last_one(template: str, conversation: str) -> None:
    if REFUSED.get((template, conversation)):
        return
    messages = CONVERSATIONS[conversation]
    parser = ChatTemplateParser(tokenizer_for(template))
    _, ids, mask = parser.tokenize_and_mask(messages, tools_of(messages))
    assert masked_texts(template, ids, mask) == learned(template, conversation)[-1:]
