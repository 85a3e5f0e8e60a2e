"""Templates other than the model's own: a file, and the tool prompt in front of a template that prints no tools."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_parser import tool_format_of_template, tool_parser
from rllm.parser.tool_prompt import TemplateChoice
from rllm.trainer.config import load_config

from .conftest import TEMPLATES, _trained

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHERS = {
    "chatml": CHATML,
    "parts": CHATML.replace("m.content", "m.content[0].text"),
    "no system": CHATML.replace("{{", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{", 1),
    "own calls": TEMPLATES["qwen3_coder"],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "Does a thing.", "parameters": {"b": {}}}}
ANSWER = (
    'Wait.\n<tool_call>\n{"name": "f", "arguments": {"b":  7}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)


def chosen(text: str | None, **choice: Any) -> ChatTemplate:
    tokenizer = deepcopy(_trained())
    tokenizer.chat_template = text
    TemplateChoice(**choice).apply(tokenizer)
    return ChatTemplate(tokenizer)


def conversation() -> list[dict[str, Any]]:
    """Return a conversation whose answer was parsed from `ANSWER`, with both results and a question after it."""
    parsed = tool_parser("hermes").parse(ANSWER)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(parsed.tool_calls, ("seven", "eight"), strict=True)
    ]
    answer = {"role": "assistant", "content": parsed.content, "tool_calls": parsed.tool_calls}
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "how many"},
        answer,
        *results,
        {"role": "assistant", "content": "fifteen"},
        {"role": "user", "content": "sure"},
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_tool_prompt_renders_calls_as_the_model_writes_them(name: str) -> None:
    template = chosen(OTHERS[name], tool_prompt="hermes")
    assert template.shape.lost.keys() <= {"system messages after the first turn"}
    assert tool_format_of_template(template.text) == "hermes"
    text = template.render_text(conversation(), [TOOL])
    place = 0
    for mark in ("be brief", "Does a thing", "how many", ANSWER, "seven", "eight", "fifteen", "sure"):
        place = text.find(mark, place)
        assert place >= 0, (mark, text)
    assert text.count("<|im_start|>user") == 3, "a question, both results in one turn, a question"


@pytest.mark.parametrize("name", OTHERS)
def test_prompt_without_tools_is_unchanged(name: str) -> None:
    plain = [
        {"role": "user", "content": "how many"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert chosen(OTHERS[name], tool_prompt="hermes").render_text(plain) == chosen(OTHERS[name]).render_text(plain)


def test_tool_prompt_is_added_once() -> None:
    once = chosen(CHATML, tool_prompt="hermes").text
    assert once.endswith(CHATML)
    assert chosen(once, tool_prompt="hermes").text == once


def test_trained_text_with_the_tool_prompt_is_what_the_model_writes() -> None:
    tokenizer = deepcopy(_trained())
    tokenizer.chat_template = CHATML
    TemplateChoice(tool_prompt="hermes").apply(tokenizer)
    parser = ChatTemplateParser(tokenizer)
    _, ids, mask = parser.tokenize_and_mask_cumulative(conversation()[:-1], [TOOL])
    learned = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])
    assert learned == f"{ANSWER}<|im_end|>fifteen<|im_end|>"


def test_file_replaces_the_template_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(CHATML)
    assert chosen(None, chat_template=file).text == CHATML
    assert chosen("nothing", chat_template=file, tool_prompt="hermes").text.endswith(CHATML)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"  \n", "is empty"),
        (b"{% for m in messages %}\n{{ m.content", "not a valid Jinja"),
        (b"{% for m in messages %}{{ m.role }}{% endfor %}", "no text of user messages"),
    ],
)
def test_unusable_file_is_rejected_by_name(tmp_path: Path, written: bytes | None, named: str) -> None:
    file = tmp_path / "own.jinja"
    if written is not None:
        file.write_bytes(written)
    with pytest.raises(ConfigError, match=rf"model\.chat_template='.*own\.jinja'.*{named}"):
        chosen(CHATML, chat_template=file)


@pytest.mark.parametrize(("parser", "fits"), [("hermes", True), ("mistral", False)])
def test_calls_are_parsed_in_the_format_of_the_prompt(parser: str, fits: bool) -> None:
    model = load_config(["model.tool_prompt=hermes", f"model.tool_parser={parser}"]).model
    if fits:
        assert TemplateChoice.of(model)
        return
    with pytest.raises(ConfigError, match=r"model\.tool_parser='mistral'.*model\.tool_prompt"):
        TemplateChoice.of(model)


@pytest.mark.parametrize("family", TEMPLATES)
def test_answers_of_every_family_can_be_trained_with_the_tool_prompt(
    family: str, parser_of: Callable[..., ChatTemplateParser]
) -> None:
    tokenizer = deepcopy(parser_of(family).tokenizer)
    TemplateChoice(tool_prompt="hermes").apply(tokenizer)
    _, ids, mask = ChatTemplateParser(tokenizer).tokenize_and_mask(conversation()[:3], [TOOL])
    assert ANSWER in tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])
