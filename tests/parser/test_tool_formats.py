from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.parser.answer import visible
from rllm.parser.tool_formats import TOOL_FORMATS, ToolFormat
from rllm.parser.tool_parser import tool_format_of_template, tool_parser

R1_BLOCK, R1_BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
R1_CALL, R1_CALL_END, R1_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
WRITTEN = r'{"b":  7.0,"a":[6, {"x": "}"}], "note": "caf\u00e9 → [TOOL] ok\/fine" }'
"""Arguments that change if they are parsed and serialized."""


def r1(name: str, arguments: str) -> str:
    return f"{R1_CALL}function{R1_SEP}{name}\n```json\n{arguments}\n```{R1_CALL_END}"


def found(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of a text, and each call's name and arguments."""
    parsed = tool_parser(name).parse(text)
    return parsed.content, [(call["function"]["name"], call["function"]["arguments"]) for call in parsed.tool_calls]


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", f'So.\n<tool_call>\n{{"name": "f", "arguments": {WRITTEN}}}\n</tool_call>', "So."),
        ("llama3_json", f'{{"name": "f", "parameters": {WRITTEN}}}', ""),
        ("llama3_json", f'So.<|python_tag|>{{"type": "function", "name": "f", "arguments": {WRITTEN}}}', "So."),
        ("mistral", f'So.[TOOL_CALLS] [{{"name": "f", "arguments": {WRITTEN}, "id": "x1"}}]', "So."),
        ("mistral", f"So.[TOOL_CALLS]f[ARGS]{WRITTEN}", "So."),
        ("mistral", f"So.[TOOL_CALLS]f[CALL_ID]x1[ARGS]{WRITTEN}", "So."),
        ("mistral", f"[TOOL_CALLS]f{WRITTEN}", ""),
        ("deepseek_r1", f"So.{R1_BLOCK}{r1('f', WRITTEN)}{R1_BLOCK_END}", "So."),
        ("deepseek_r1", f"So.{R1_BLOCK}{R1_CALL}f{R1_SEP}{WRITTEN}{R1_CALL_END}{R1_BLOCK_END}", "So."),
        ("deepseek_r1", f"{R1_BLOCK}{R1_CALL}f{R1_SEP}{WRITTEN}", ""),
        ("harmony", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{WRITTEN}<|call|>", ""),
        ("harmony", f" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{WRITTEN}", ""),
    ],
)
def test_arguments_stay_exactly_as_written(name: str, text: str, content: str) -> None:
    assert found(name, text) == (content, [("f", WRITTEN)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}'),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {}}<|python_tag|>{"name": "g", "parameters": {"x": 1}}',
        ),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"x": 1}'),
        ("deepseek_r1", R1_BLOCK + r1("f", "{}") + "\n" + r1("g", '{"x": 1}') + R1_BLOCK_END),
        (
            "harmony",
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
            '<|start|>assistant<|channel|>commentary to=functions.g<|message|>{"x": 1}<|call|>',
        ),
    ],
)
def test_several_calls_are_parsed(name: str, text: str) -> None:
    assert found(name, text) == ("", [("f", "{}"), ("g", '{"x": 1}')])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Ada", "age": 36}'),  # an answer, not a call
        ("llama3_json", '{"name": "f", "parameters": {}} and more'),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g"'),
        ("llama3_json", '{"name": "f", "parameters": [1]}'),
        ("llama3_json", r'{"name": "f\ud83d", "parameters": {}}'),  # half of a surrogate pair, which cannot be sent
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"x\": \"\ud83d\"}"}</tool_call>'),
        ("llama3_json", 'Like {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 3}]'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "args": {"x": 1}}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} and more"),
        ("deepseek_r1", R1_BLOCK + R1_BLOCK_END),
        ("deepseek_r1", r1("f", "{}")),  # outside a block
        ("deepseek_r1", f"{R1_BLOCK}{r1('f', '{')}{R1_BLOCK_END} and more"),
        ("deepseek_r1", f"{R1_BLOCK}{R1_CALL}f{R1_CALL_END}"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{oops<|call|>"),
        ("harmony", "plain <|end|> text"),
        ("harmony", "stray<|message|>text<|end|>"),
        ("harmony", "<|start|>assistant<|chan"),
        ("kimi_k2", KIMI[0] + KIMI[1]),
        (
            "kimi_k2",
            KIMI[0] + "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>" + KIMI[1],
        ),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:[1}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x}<tool_call|>'),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=1)] and more"),
        ("lfm2", "<|tool_call_start|>[f(a=1), <|tool_call_end|>"),
        ("llama4_pythonic", "[f(a=1)] and more"),
        ("llama4_pythonic", "[1, 2]"),
        ("llama4_json", '{"name": "Ada", "age": 36}'),
        ("llama4_json", '{"name": "Ada"}'),
        ("minimax_m2", '<invoke name="f"></invoke>'),  # outside a block
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</minimax:tool_call>'),
        ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"> and more'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}, {"tool_name": 3}]<|END_ACTION|>'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "f", "parameters": {}} and more'),
        ("granite", '<|tool_call|>[{"name": "f"'),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>'),
        ("hunyuan_a13b", "<tool_calls></tool_calls>"),
        ("phi4_mini_json", "functools[0]"),
    ],
)
def test_malformed_calls_stay_content_unchanged(name: str, text: str) -> None:
    assert found(name, text) == (text, [])


def test_malformed_call_does_not_hide_a_valid_one() -> None:
    bad = r1("f", "{oops")
    assert found("deepseek_r1", R1_BLOCK + bad + r1("g", "{}") + R1_BLOCK_END) == (bad, [("g", "{}")])
    assert found("mistral", "[TOOL_CALLS]f[ARGS]{oops[TOOL_CALLS]g[ARGS]{}") == (
        "[TOOL_CALLS]f[ARGS]{oops",
        [("g", "{}")],
    )


MUSE_CALL = (
    ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="n">2</atem:parameter>\n'
    '<atem:parameter name="s">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
GLM_CALL = "\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n<arg_key>s</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
TYPED = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]


MINIMAX_CALL = (
    '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">2</parameter>\n<parameter name="s">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
SEED_CALL = (
    "<seed:tool_call>\n<function=f>\n<parameter=n>2</parameter>\n<parameter=s>2</parameter>\n</function>\n"
    "</seed:tool_call>"
)
HUNYUAN_CALL = (
    "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>n</arg_key:opensource>\n"
    "<arg_value:opensource>2</arg_value:opensource>\n<arg_key:opensource>s</arg_key:opensource>\n"
    "<arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("glm45", GLM_CALL),
        ("muse_glimmer", MUSE_CALL),
        ("minimax_m2", MINIMAX_CALL),
        ("seed_oss", SEED_CALL),
        ("hy_v3", HUNYUAN_CALL),
    ],
)
def test_bare_values_become_json_by_the_schemas(name: str, call: str) -> None:
    parsed = tool_parser(name).for_tools(TYPED).parse(call)
    assert parsed.content == ""
    assert [item["function"]["arguments"] for item in parsed.tool_calls] == ['{"n": 2, "s": "2"}']


DSML_CALL = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="false">[2, {"x": null}]'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="s" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("deepseek_v32", DSML_CALL, {"n": [2, {"x": None}], "s": "2"}),  # each value has a mark for text
        (
            "gemma4",
            '<|tool_call>call:f{n:-2.5,s:<|"|>a "b", {c}<tool_call|>\n<|"|>,l:[1,true,null,{k:<|"|>2<|"|>}],o:{}}<tool_call|>',
            {"n": -2.5, "s": 'a "b", {c}<tool_call|>\n', "l": [1, True, None, {"k": "2"}], "o": {}},
        ),
        (
            "lfm2",
            """<|tool_call_start|>[f(n=-2, s='it\\'s\\n"é")', b=False, o={"k": null, 'j': [1.5, "]"]}, t=(1, 2))]<|tool_call_end|>""",
            {"n": -2, "s": 'it\'s\n"é")', "b": False, "o": {"k": None, "j": [1.5, "]"]}, "t": [1, 2]},
        ),
        ("llama4_pythonic", "[f(s='\\u00e9\\ud83d\\ude00', n=None)]", {"s": "é😀", "n": None}),
        ("llama4_json", '<|python_start|><|python_end|>{"name": "f", "parameters": {"n": 2}}', {"n": 2}),
        ("seed_oss", "<seed:tool_call><function=f></function></seed:tool_call>", {}),
    ],
)
def test_values_are_parsed_with_their_types(name: str, text: str, arguments: dict[str, Any]) -> None:
    content, [(function, read)] = found(name, "So." + text if name not in ("llama4_pythonic", "llama4_json") else text)
    assert (content.removeprefix("So."), function, json.loads(read)) == ("", "f", arguments)


def test_python_list_is_parsed_if_the_schema_allows_a_list() -> None:
    tool = {"type": "object", "properties": {"l": {"type": "array"}, "s": {"type": "string"}}}
    call = (
        "<seed:tool_call><function=f><parameter=l>[1, 'x', True]</parameter><parameter=s>['x']</parameter></function>"
    )
    parser = tool_parser("seed_oss").for_tools([{"type": "function", "function": {"name": "f", "parameters": tool}}])
    [read] = parser.parse(call).tool_calls
    assert json.loads(read["function"]["arguments"]) == {"l": [1, "x", True], "s": "['x']"}


def test_ids_of_kimi_are_kept() -> None:
    [call] = tool_parser("kimi_k2").parse(calls_text("kimi_k2", [("f", "{}")])).tool_calls
    assert call["id"] == "functions.f:0"


def test_muse_glimmer_recipients_are_distinguished() -> None:
    parse = tool_parser("muse_glimmer").parse
    parsed = parse(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>It is 4.")
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("Hm.", "It is 4.", [])
    assert parse(" to=f<|message|>no call").content == " to=f<|message|>no call"


def test_harmony_channels_are_distinguished() -> None:
    parsed = tool_parser("harmony").parse(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|> It is 4.<|return|>"
    )
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("Hm.\nSo.", "I look it up. It is 4.", [])


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("llama3_json", '  {"name"', ""),
        ("llama3_json", 'Use {"x"', 'Use {"x"'),
        ("llama3_json", "Use <|pyth", "Use "),
        ("mistral", "Use [TOOL", "Use "),
        ("deepseek_r1", "Use <｜tool▁calls", "Use "),
        ("harmony", "<|channel|>final<|message|>Hi", ""),
        ("harmony", " to", ""),
        ("harmony", "today", "today"),
    ],
)
def test_text_that_may_become_a_call_is_held_back(name: str, text: str, shown: str) -> None:
    assert shown_of(tool_parser(name), text) == shown


def shown_of(parser: ToolFormat, text: str) -> str:
    return visible(text, parser).content


NAMES = [
    *("hermes", "llama3_json", "mistral", "deepseek_r1", "harmony", "kimi_k2", "cohere_command3", "granite"),
    *("hunyuan_a13b", "apertus", "phi4_mini_json"),
]
"""Formats that write arguments as JSON."""
TAGGED = ["glm45", "muse_glimmer", "deepseek_v32", "minimax_m2", "seed_oss", "hy_v3"]
"""Formats that write each argument as bare text between tags."""
LITERALS = ["gemma4", "lfm2", "llama4_pythonic"]
"""Formats that write arguments as literals of another language."""
LISTS = {
    "cohere_command3": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "granite": ("<|tool_call|>", "<|/tool_call|>"),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "phi4_mini_json": ("functools", ""),
}
"""Tags of formats that write a list of objects."""
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "\n"],
    "llama3_json": ["<|python_tag|>", ";", "; ", '"parameters": '],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[", "]", "[CALL_ID]"],
    "deepseek_r1": [R1_BLOCK, R1_BLOCK_END, R1_CALL, R1_CALL_END, R1_SEP, "function", "\n```json\n", "\n```"],
    "harmony": [
        "<|start|>assistant",
        "<|channel|>final",
        "<|channel|>analysis",
        "<|message|>",
        "<|end|>",
        " to=functions.f",
    ],
    **{name: [*tags, "[", "]", "]" + tags[1], tags[0] + "["] for name, tags in LISTS.items()},
    "kimi_k2": [*KIMI, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    "deepseek_v32": [
        "<｜DSML｜function_calls>",
        '\n<｜DSML｜invoke name="f">',
        '\n<｜DSML｜parameter name="k" string="true">',
        "</｜DSML｜parameter>",
        "\n</｜DSML｜invoke>",
        "\n</｜DSML｜function_calls>",
    ],
    "minimax_m2": [
        "<minimax:tool_call>",
        '\n<invoke name="f">',
        '\n<parameter name="k">',
        "</parameter>",
        "\n</invoke>",
        "\n</minimax:tool_call>",
    ],
    "seed_oss": [
        "<seed:tool_call>\n<function=f>",
        "\n<parameter=k>",
        "</parameter>",
        "\n</function>\n</seed:tool_call>",
    ],
    "hy_v3": [
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>",
        "<arg_key:opensource>k</arg_key:opensource><arg_value:opensource>",
        "</arg_value:opensource>",
        "</tool_call:opensource>",
        "</tool_calls:opensource>",
    ],
    "gemma4": ["<|tool_call>call:f{", "k:", '<|"|>', ",", "[", "}<tool_call|>"],
    "lfm2": ["<|tool_call_start|>[f(", "k=", "'", ")", ", f(", "]<|tool_call_end|>"],
    "llama4_pythonic": ["[f(", "k=", "'", ")", ", f(", "]"],
    "glm45": ["<tool_call>", "<tool_call>f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "muse_glimmer": [
        "<|start|>assistant",
        " to=f",
        " to=user",
        "<|message|>",
        "<|eom|>",
        '<atem:invoke name="f">',
        '<atem:parameter name="k">',
        "</atem:parameter>",
        "</atem:invoke>",
    ],
}
COMMON = [
    '{"name": "f"',
    ', "arguments": ',
    ', "parameters": ',
    "{}",
    "}",
    "f",
    "x",
    " ",
    '"',
    "\\",
    '{"name": "f", "arguments": {}}',
]


def texts(name: str) -> st.SearchStrategy[str]:
    pieces = st.sampled_from(PIECES[name] + COMMON)
    return st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=14).map("".join)


def is_subsequence(part: str, whole: str) -> bool:
    letters = iter(whole)
    return all(letter in letters for letter in part)


@pytest.mark.parametrize("name", NAMES + TAGGED + LITERALS)
@given(data=st.data())
def test_any_text_is_parsed_without_error_or_loss(name: str, data: Any) -> None:
    text = data.draw(texts(name))
    parser = tool_parser(name)
    parsed = parser.parse(text)
    assert is_subsequence(parsed.content, text)
    if not parsed.tool_calls and not parser.reads_every_answer:
        assert parsed.content == text
    for call in parsed.tool_calls if name in NAMES else ():
        arguments = call["function"]["arguments"]
        assert arguments in text or arguments == "{}" or "\\" in text
    for length in range(len(text) + 1):
        assert parsed.content.startswith(shown_of(parser, text[:length]))


def object_text(name: str, function: str, arguments: str) -> str:
    """Return a call in a list of them."""
    if name == "apertus":
        return f'{{"{function}": {arguments}}}'
    if name == "cohere_command3":
        return f'\n    {{"tool_call_id": "0", "tool_name": "{function}", "parameters": {arguments}}}'
    return f'{{"name": "{function}", "arguments": {arguments}}}'


def calls_text(name: str, calls: list[tuple[str, str]]) -> str:
    """Return calls as a model of this family writes them."""
    match name:
        case "hermes":
            return "\n".join(f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a in calls)
        case "llama3_json":
            return "; ".join(f'{{"name": "{f}", "parameters": {a}}}' for f, a in calls)
        case "mistral":
            return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{f}", "arguments": {a}}}' for f, a in calls) + "]"
        case "mistral, named":
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{a}" for f, a in calls)
        case name if name in LISTS:
            opening, closing = LISTS[name]
            return opening + "[" + ", ".join(object_text(name, f, a) for f, a in calls) + "]" + closing
        case "kimi_k2":
            call = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
            return KIMI[0] + "".join(call.format(f, n, a) for n, (f, a) in enumerate(calls)) + KIMI[1]
        case "deepseek_r1":
            return R1_BLOCK + "\n".join(r1(f, a) for f, a in calls) + R1_BLOCK_END
        case "deepseek_r1, bare":
            return R1_BLOCK + "".join(f"{R1_CALL}{f}{R1_SEP}{a}{R1_CALL_END}" for f, a in calls) + R1_BLOCK_END
        case _:
            call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
            return "<|start|>assistant".join(call.format(f, a) for f, a in calls)


MARKUP = [
    *(piece for pieces in PIECES.values() for piece in pieces),
    "<|call|>",
    "<|return|>",
    "```",
    "</think>",
    "<think>",
]


@pytest.mark.parametrize("name", [*NAMES, "mistral, named", "deepseek_r1, bare"])
@given(data=st.data())
def test_markup_inside_the_strings_of_arguments_is_content(name: str, data: Any) -> None:
    pieces = st.lists(st.one_of(st.sampled_from(MARKUP + COMMON), st.text(max_size=3)), max_size=5).map("".join)
    arguments = st.dictionaries(pieces, st.one_of(pieces, st.lists(pieces, max_size=2)), max_size=3)
    written = st.builds(lambda value, plain: json.dumps(value, ensure_ascii=plain), arguments, st.booleans())
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "look_up"]), written), min_size=1, max_size=3))
    assert found(name.partition(",")[0], calls_text(name, calls)) == ("", calls)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_well_formed_calls_within_text_are_all_found(name: str, data: Any) -> None:
    listed = "%s".join(calls_text(name, [("f", "{}")]).rsplit("{}", 1))
    wrap = {
        "hermes": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
        "llama3_json": '<|python_tag|>{"name": "f", "parameters": %s}',
        "mistral": "[TOOL_CALLS]f[ARGS]%s",
        "deepseek_r1": R1_BLOCK + R1_CALL + "f" + R1_SEP + "%s" + R1_CALL_END + R1_BLOCK_END,
        "harmony": "<|channel|>commentary to=functions.f<|message|>%s<|call|>",
    }.get(name, listed)
    arguments = data.draw(st.lists(st.sampled_from(["{}", WRITTEN, '{"x": null}']), max_size=4))
    before = data.draw(st.sampled_from(["", "So.", "a {b} c"]))
    assert found(name, before + "".join(wrap % item for item in arguments)) == (
        before,
        [("f", item) for item in arguments],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES + TAGGED + LITERALS)
@pytest.mark.parametrize(
    "piece_of",
    [lambda pieces: pieces[0], lambda pieces: "".join(pieces[:-1]), lambda pieces: pieces[0] + '{"name": "f", "x": ['],
)
def test_long_malformed_text_is_parsed_in_linear_time(name: str, piece_of: Any) -> None:
    text = piece_of(PIECES[name]) * 2000  # would take half a minute with backtracking
    assert len(tool_parser(name).parse(text).tool_calls) <= 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '\\n<tool_call>\\n' + call }}", "hermes"),
        ("{{ '\\n<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>\\n' }}", "qwen3_coder"),
        ("{{ '<|python_tag|>' + call }}", "llama3_json"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' + result }}", "llama3_json"),
        ("{{ '[TOOL_CALLS]' + calls }}", "mistral"),
        (f"{{{{ '{R1_BLOCK}' + calls }}}}", "deepseek_r1"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' + content }}", "harmony"),
        ("{{ '<|tool_call>call:' + name + '{' }}", "gemma4"),
        ("{{ '<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>' }}", "seed_oss"),
        ("{{ '<|python_start|>' + call }}", "llama4_json"),
        # Tags shared by formats do not make them one format.
        ("{{ '\\n<tool_call>' + name + '\\n<arg_key>' + key + '</arg_key>' }}", "glm45"),
        ("{{ '<|start|>assistant to=' + name + '<|message|><atem:invoke name=\"' + name + '\">' }}", "muse_glimmer"),
        ("{{ '<|start|>assistant to=user<|message|>' + content + '<|eot|>' }}", None),
    ],
)
def test_format_of_a_template_is_detected_by_its_markers(template: str, name: str | None) -> None:
    assert tool_format_of_template(template) == name


def test_template_without_calls_has_no_format() -> None:
    assert tool_format_of_template("{{ messages[0].content }}") is None


def test_aliases_name_the_same_format() -> None:
    assert tool_parser("qwen") is tool_parser("hermes")
    assert tool_parser("r1") is tool_parser("deepseek_r1")
    assert set(NAMES) < set(TOOL_FORMATS)
