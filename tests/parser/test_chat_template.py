from __future__ import annotations

import hashlib
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rllm.errors import ConfigError
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_formats.hermes import HermesToolParser

PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
QUOTING = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
VERBATIM = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if (loop.first and m.content) or not loop.first %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}{% endfor %}"
)


def template(text: str | None) -> ChatTemplate:
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, ">": 3, "[": 4, "]": 5, "|": 6, "user": 7}, "?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def text_of(source: str, *messages: Any, **options: Any) -> str:
    return template(source).render_text(messages, **options)


def test_messages_become_ids() -> None:
    ids = template("{{ messages[0].content }} {% if add_generation_prompt %}>{% endif %}").render(
        [{"role": "user", "content": "a b a"}]
    )
    assert ids == [1, 2, 1, 3]


def test_a_repeated_prompt_is_remembered_and_may_be_changed_by_its_owner() -> None:
    chat = template("{{ messages[0].content }}")
    messages = [{"role": "user", "content": "a b"}]
    chat.render(messages).append(99)
    assert chat.render(messages) == [1, 2]
    assert chat.render([{"role": "user", "content": "b"}]) == [2]
    assert chat.render(messages, tools=[{"x": {1, 2}}]) == [1, 2]  # not JSON: simply not remembered


def test_what_real_clients_send_is_understood() -> None:
    rendered = text_of(
        PLAIN,
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "input_text", "text": "two"}, "!"]},
        {"role": "assistant", "content": None, "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    )
    assert rendered == "[system|be brief][user|one two!][assistant|][tool|][assistant|no]>"
    assert text_of(PLAIN, {"role": "user", "content": ""}, add_generation_prompt=False) == "[user|]"


def call_with(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ('{"b": 1,  "a": 2}', '{"b": 1, "a": 2}'),
        ({"b": 1}, '{"b": 1}'),
        ('{"b": ', '"{\\"b\\": "'),
        ("[1]", '"[1]"'),
        ("[" * 2000, f'"{"[" * 2000}"'),
    ],
)
def test_arguments_are_parsed_for_templates_that_would_quote_them(arguments: Any, printed: str) -> None:
    assert text_of(QUOTING, call_with(arguments)) == printed


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "f", "arguments": {"b":  7.0,"a":6 }}\n</tool_call>',
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"x": "\\u00e9"}}\n</tool_call>',
    ],
)
def test_a_parsed_answer_renders_to_the_text_it_was_parsed_from(answer: str) -> None:
    parsed = HermesToolParser().parse(answer)
    message = {"role": "assistant", "content": parsed.content or None, "tool_calls": parsed.tool_calls}
    assert text_of(VERBATIM, message, add_generation_prompt=False) == answer


def test_template_kwargs_reach_the_template() -> None:
    source = "{{ 'thinking' if enable_thinking else 'fast' }}"
    assert text_of(source, {"role": "user", "content": ""}, template_kwargs={"enable_thinking": True}) == "thinking"


def test_reasoning_goes_by_any_of_its_names() -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert text_of(source, {"role": "assistant", "reasoning": "hm"}) == "hm hm"
    assert text_of(source, {"role": "assistant", "reasoning_content": "hm"}) == "hm hm"


def test_the_hash_is_that_of_the_template_text() -> None:
    assert template(PLAIN).hash == hashlib.sha256(PLAIN.encode()).hexdigest()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "send at least one message"),
        (["hi"], r"messages\[0\]='hi'"),
        ([{"content": "hi"}], r"messages\[0\]=.*'role'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content=3"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "a cat"}]}], "part of type 'image_url'"),
    ],
)
def test_malformed_messages_are_named(messages: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        template(PLAIN).render(messages)


def test_a_refusing_template_is_quoted() -> None:
    with pytest.raises(ConfigError, match=r"refuses these messages: .*only users"):
        text_of("{{ raise_exception('only users') }}", {"role": "system", "content": "x"})


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"chat_template": ENDLESS}, "a request cannot bring another template than the model's"),
        ([1], r"chat_template_kwargs=\[1\]: use an object"),
        ("enable_thinking", "use an object"),
        (5, "use an object"),
    ],
)
def test_a_request_switches_a_template_and_brings_none(kwargs: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        template(PLAIN).render([{"role": "user", "content": "hi"}], template_kwargs=kwargs)


def test_a_tokenizer_without_template_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has no chat template: .*chat_template\.jinja"):
        template(None)
