"""Calls whose values are bare text, which the tools' schemas make JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.agents.tool_agent import ToolAgent
from rllm.parser import ChatTemplateParser, get_tool_parser
from rllm.parser.answer import visible
from rllm.parser.tool_parser import parser_of_answer, tool_parser

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "range": {"type": "object"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "place": {"$ref": "#/$defs/Place"},
    "level": {"enum": [1, 2, "all"]},
    "loop": {"$ref": "#/$defs/Loop"},
    "untyped": {"description": "anything"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]


def call(name: str, **values: str) -> str:
    """Return a call as a model of this family writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def found(text: str, tools: Any = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    parsed = tool_parser("qwen3_coder").for_tools(tools).parse(text)
    return parsed.content, [(one["function"]["name"], one["function"]["arguments"]) for one in parsed.tool_calls]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", '"5"'),
        ("text", "null", '"null"'),
        ("text", "  two\n\n lines\n", '"  two\\n\\n lines\\n"'),
        ("text", 'café "→"', '"café \\"→\\""'),
        ("text", "", '""'),
        ("count", "5", "5"),
        ("count", " 5 ", "5"),
        ("count", "5.5", "5.5"),  # the tool reports the error
        ("count", "many", '"many"'),
        ("count", "true", '"true"'),  # not a number, although Python accepts it
        ("share", "1e3", "1e3"),
        ("share", "7", "7"),
        ("share", "NaN", '"NaN"'),
        ("deep", "True", "true"),  # as templates print it
        ("deep", "false", "false"),
        ("deep", "1", '"1"'),
        ("tags", '["a",  "b"]', '["a",  "b"]'),
        ("tags", "a, b", '"a, b"'),
        ("range", '{"from": {"x": 1.0}}', '{"from": {"x": 1.0}}'),
        ("limit", "None", "null"),
        ("limit", "3", "3"),
        ("either", "3", "3"),
        ("either", "three", '"three"'),
        ("place", '{"lat": 1}', '{"lat": 1}'),
        ("level", "2", "2"),
        ("level", "all", '"all"'),
        ("loop", "1", '"1"'),
        ("untyped", "1", '"1"'),
        ("unknown", "1", '"1"'),
    ],
)
def test_values_have_the_types_of_the_schema_and_their_exact_text(key: str, written: str, value: str) -> None:
    assert found(call("find", **{key: written})) == ("", [("find", f'{{"{key}": {value}}}')])


def test_values_without_schema_are_text() -> None:
    assert found(call("find", count="5"), []) == ("", [("find", '{"count": "5"}')])
    assert found(call("other", count="5")) == ("", [("other", '{"count": "5"}')])
    assert found(call("find", count="5"), [{"type": "function", "function": {"name": "find", "parameters": 3}}])[1]


def test_calls_within_text() -> None:
    first, second = call("find", count="1"), call("go")
    calls = [("find", '{"count": 1}'), ("go", "{}")]
    assert found(f"So.\n\n{first}\n{second}") == ("So.", calls)
    assert found(f"{first}and{second}.") == ("and.", calls)
    both = f"<function=find><parameter=count>1</parameter></function>\n{second.removeprefix('<tool_call>')}"
    assert found(f"<tool_call>\n{both}") == ("", calls)


@pytest.mark.parametrize(
    "cut",
    [
        lambda text: text.removeprefix("<tool_call>\n"),  # which the models often do
        lambda text: text.removesuffix("</tool_call>"),
        lambda text: text.replace("\n", ""),
        lambda text: text.replace(">\n<parameter", "> \n\n<parameter"),
    ],
)
def test_unambiguous_mistakes_are_accepted(cut: Callable[[str], str]) -> None:
    assert found(cut(call("find", count="1", text="a")))[1] == [("find", '{"count": 1, "text": "a"}')]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n</tool_call>",
        '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=find>\n<parameter=text>\nhalf",
        "<tool_call>\n<function=find>\n<parameter=text>\nhalf\n</function>\n</tool_call>",
        "<function=find>\n<parameter=text>\nall\n</parameter>",
        "<function=find>\nwords\n</function>",
        "<function=>\n</function>",
        "f <function=",
    ],
)
def test_malformed_calls_stay_content_unchanged(text: str) -> None:
    assert found(text) == (text, [])


def test_malformed_call_does_not_consume_part_of_the_next() -> None:
    bad = "<tool_call>\n<function=find>\n<parameter=text>\nhalf\n</function>\n</tool_call>"
    assert found(f"{bad}\n{call('go')}") == (bad, [("go", "{}")])


@pytest.mark.parametrize(
    "inside", ["</parameter>", "</function>", "<parameter=x>", "</tool_call>", "<tool_call>", "<think>"]
)
def test_markup_inside_a_value_belongs_to_it(inside: str) -> None:
    text = f"edit {inside} here\n{inside}\nand"
    assert found(call("find", text=text, count="1")) == ("", [("find", json.dumps({"text": text, "count": 1}))])


PIECES = "<tool_call> </tool_call> <function=f> </function> <parameter=x> </parameter> \n".split(" ")


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=16).map("".join))
def test_any_text_is_parsed_without_loss(text: str) -> None:
    parser = tool_parser("qwen3_coder")
    parsed = parser.parse(text)
    letters = iter(text)
    assert all(letter in letters for letter in parsed.content)
    assert parsed.tool_calls or parsed.content == text
    for one in parsed.tool_calls:
        assert isinstance(json.loads(one["function"]["arguments"]), dict)
    for length in range(len(text) + 1):
        assert parsed.content.startswith(visible(text[:length], parser).content)


VALUES = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


@given(text=st.text(max_size=8), count=st.integers(), deep=st.booleans(), items=st.lists(VALUES, max_size=2))
def test_calls_rendered_by_a_template_are_parsed_unchanged(
    parser_of: Callable[..., ChatTemplateParser], text: str, count: int, deep: bool, items: list[Any]
) -> None:
    parser = parser_of("qwen3_coder")
    arguments = {"text": text, "count": count, "deep": deep, "tags": items, "limit": None}
    function = {"name": "find", "arguments": json.dumps(arguments)}
    asked = {"role": "user", "content": "Hi"}
    answer = {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    prompt, ids, mask = parser.tokenize_and_mask([asked, answer], TOOLS)
    sampled = [token for token, is_sampled in zip(ids, mask, strict=True) if is_sampled]
    answers = parser.parse_completion(sampled, prompt, TOOLS)
    assert answers["content"].strip() == "So."
    (one,) = answers["tool_calls"]
    assert (one["function"]["name"], json.loads(one["function"]["arguments"])) == ("find", arguments)


@pytest.mark.parametrize(
    "piece", [*PIECES, "<function=f><parameter=x>", "<function=f><parameter=x></parameter>", call("f", x="1")]
)
def test_long_text_is_parsed_in_linear_time(piece: str) -> None:
    tool_parser("qwen3_coder").parse(
        piece * 5000 + "</function>" + " " * 50_000
    )  # would take minutes with backtracking


def test_agents_parse_values_by_their_tools() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    agent = ToolAgent(parser_name="qwen3_coder", tools=[add])
    assert "a block with its key for KEY" in agent.chat_completions[0]["content"]
    (one,) = agent.update_from_model(call("add", a="1", b="2")).action
    assert one["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}


def test_prompt_shows_a_parsable_call() -> None:
    parser = get_tool_parser("qwen3_coder")()
    example = parser.get_tool_prompt("[]").rpartition("for VALUE:\n")[2]
    (one,) = parser.parse(example.rstrip("\n"))
    assert one.to_dict() == {"name": "NAME", "arguments": {"KEY": "VALUE"}}


def test_calls_are_parsed_where_they_can_occur() -> None:
    coder, harmony = tool_parser("qwen3_coder"), tool_parser("harmony")
    assert parser_of_answer(coder, TOOLS, None).parse(call("find", count="1")).tool_calls
    assert parser_of_answer(coder, TOOLS, "none") is None
    assert parser_of_answer(coder, None, None) is None
    assert parser_of_answer(harmony, None, None) == harmony
    assert parser_of_answer(None, TOOLS, None) is None
