from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_parser import log_unread_calls, tool_parser

from ..inference.conftest import build_tokenizer
from .conftest import TEMPLATES

PARSER = tool_parser("hermes")


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def functions(text: str) -> list[tuple[str, str]]:
    return [(item["function"]["name"], item["function"]["arguments"]) for item in PARSER.parse(text).tool_calls]


def test_arguments_stay_exactly_as_written() -> None:
    written = r'{"b":  7.0,"a":6, "op":  "mul","note": "caf\u00e9 → ok\/fine" }'
    parsed = PARSER.parse(call(f'{{"name": "calc", "arguments": {written}}}'))
    assert parsed.content == ""
    (only,) = parsed.tool_calls
    assert only["type"] == "function"
    assert only["id"].startswith("call_")
    assert only["function"] == {"name": "calc", "arguments": written}


def test_several_calls_with_text_around_them() -> None:
    text = f"One.\n{call(json.dumps({'name': 'a', 'arguments': {}}))}\n{call(json.dumps({'name': 'b'}))}\nTwo."
    parsed = PARSER.parse(text)
    assert parsed.content == "One.\nTwo."
    assert functions(text) == [("a", "{}"), ("b", "{}")]
    assert len({item["id"] for item in parsed.tool_calls}) == 2


def test_arguments_quoted_by_the_model_are_unquoted_once() -> None:
    assert functions(call(r'{"name": "a", "arguments": "{\"x\": 1}"}')) == [("a", '{"x": 1}')]


def test_key_order_and_extra_keys_do_not_matter() -> None:
    assert functions(call('{"id": 3, "arguments": {"x": [1, {"y": "}"}]}, "name": "a"}')) == [
        ("a", '{"x": [1, {"y": "}"}]}')
    ]


def test_arguments_may_be_named_parameters_or_missing() -> None:
    assert functions(call('{"name": "a", "parameters": {"x": 1}}')) == [("a", '{"x": 1}')]
    assert functions(call('{"id": "c1", "type": "function", "name": "a"}')) == [("a", "{}")]


def test_closing_tag_may_be_missing_at_the_very_end() -> None:
    assert functions('<tool_call>\n{"name": "a", "arguments": {}}') == [("a", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        call('{"name": "a", "arguments": {"x": '),
        call('{"name": "a", "arguments": {}} and more'),
        call('{"name": "a", "arguments": [1]}'),
        call('{"name": 3, "arguments": {}}'),
        call('{"name": "", "arguments": {}}'),
        call('{"arguments": {}}'),
        call('{"name": "a", "argument": {"x": 1}}'),  # misspelt, not a call without arguments
        call('{"name": "a",}'),
        call("[]"),
        call("{}"),
        call(""),
        call("[" * 100_000),
        '<tool_call>\n{"name": "a", "argum',
        "<tool_call>",
        "</tool_call>",
        "no call at all",
        "",
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_malformed_calls_stay_content_unchanged(text: str) -> None:
    parsed = PARSER.parse(f"before {text}")
    assert (parsed.content, parsed.tool_calls) == (f"before {text}", [])


def test_malformed_call_does_not_hide_a_valid_one() -> None:
    bad, good = call('{"name": '), call('{"name": "a"}')
    assert PARSER.parse(f"{bad}\n{good}").content == bad
    assert functions(f"{bad}\n{good}") == [("a", "{}")]


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["<tool_call>", "</tool_call>", "\n", '{"name": "a"', ', "arguments": ', "{}", "}", '"']),
            st.text(max_size=5),
        ),
        max_size=12,
    )
)
def test_any_text_is_parsed_without_error_or_loss(parts: list[str]) -> None:
    text = "".join(parts)
    parsed = PARSER.parse(text)
    if not parsed.tool_calls:
        assert parsed.content == text
    for name, arguments in functions(text):
        assert name in text
        assert arguments in text or arguments == "{}" or '"' in arguments


def test_parsers_are_found_by_name() -> None:
    assert tool_parser("rllm.parser.tool_formats:_HERMES") is PARSER
    with pytest.raises(ConfigError, match="tool_parser='json:dumps'"):
        tool_parser("json:dumps")
    with pytest.raises(ConfigError, match="tool_parser='herms' is not known: did you mean 'hermes'"):
        tool_parser("herms")


PRINTS_CALLS = "{%- for c in m.tool_calls or [] -%}(({{ c.function.name }}|{{ c.function.arguments }})){%- endfor -%}"


@pytest.mark.parametrize(
    ("tools", "calls", "is_unread", "remedy"),
    [
        ("{{- tools -}}", PRINTS_CALLS, True, "model.tool_parser"),
        ("{{- tools -}}", "", False, "model.tool_prompt"),  # as LFM2's: how it writes calls is not known
        ("", "", False, None),
    ],
)
def test_unparsable_calls_are_reported_once_a_model_is_loaded(
    caplog: pytest.LogCaptureFixture, tools: str, calls: str, is_unread: bool, remedy: str | None
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        tools + "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}" + calls + "{%- endfor -%}"
    )
    assert log_unread_calls(ChatTemplate(tokenizer), tool_parser("hermes")) == is_unread
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (remedy is not None)
    assert all(remedy in text and "without tools" in text for text in logged if remedy)


def test_parsable_calls_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATES["qwen3_coder"]
    log_unread_calls(ChatTemplate(tokenizer), tool_parser("qwen3_coder"))
    assert not caplog.records
