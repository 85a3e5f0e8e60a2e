from __future__ import annotations

import hashlib
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rllm.errors import ConfigError
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_parser import tool_parser

PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
QUOTING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
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


def test_cached_prompt_may_be_modified_by_its_owner() -> None:
    chat = template("{{ messages[0].content }}")
    messages = [{"role": "user", "content": "a b"}]
    chat.render(messages).append(99)
    assert chat.render(messages) == [1, 2]
    assert chat.render([{"role": "user", "content": "b"}]) == [2]
    assert chat.render(messages, tools=[{"x": {1, 2}}]) == [1, 2]  # not JSON: not cached


def test_messages_of_real_clients_are_accepted() -> None:
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
def test_arguments_are_parsed_if_the_template_quotes_strings(arguments: Any, printed: str) -> None:
    assert text_of(QUOTING, call_with(arguments)) == f"f:{printed}"


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "f", "arguments": {"b":  7.0,"a":6 }}\n</tool_call>',
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"x": "\\u00e9"}}\n</tool_call>',
    ],
)
def test_parsed_answer_renders_to_its_original_text(answer: str) -> None:
    parsed = tool_parser("hermes").parse(answer)
    message = {"role": "assistant", "content": parsed.content or None, "tool_calls": parsed.tool_calls}
    assert text_of(VERBATIM, message, add_generation_prompt=False) == answer


def test_template_kwargs_reach_the_template() -> None:
    source = "{{ messages[0].content }}{{ 'thinking' if enable_thinking else 'fast' }}"
    assert text_of(source, {"role": "user", "content": ""}, template_kwargs={"enable_thinking": True}) == "thinking"


def test_reasoning_is_accepted_under_any_of_its_names() -> None:
    source = "{{ messages[0].content }}{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert text_of(source, {"role": "assistant", "reasoning": "hm"}) == "hm hm"
    assert text_of(source, {"role": "assistant", "reasoning_content": "hm"}) == "hm hm"


def test_hash_is_that_of_the_template_text() -> None:
    assert template(PLAIN).hash == hashlib.sha256(PLAIN.encode()).hexdigest()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "send at least one message"),
        (["hi"], r"messages\[0\]='hi'"),
        ([{"content": "hi"}], r"messages\[0\]=.*'role'"),
        ([{"role": "assistant", "tool_calls": 3}], r"messages\[0\]\.tool_calls=3"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content=3"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "a cat"}]}], "part of type 'image_url'"),
    ],
)
def test_malformed_messages_are_reported(messages: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        template(PLAIN).render(messages)


USER, SYSTEM = {"role": "user", "content": "a b"}, {"role": "system", "content": "be brief"}
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([SYSTEM, USER], r"messages\[0\] \(role 'system'\).*no system role.*first user message"),
        ([{**SYSTEM, "role": "developer"}, USER], r"messages\[0\] \(role 'developer'\).*no system role"),
        (
            [USER, call_with("{}"), USER, USER, USER, USER],
            r"messages\[3\] \(role 'user'\).*must alternate.*join it with the message before.*chat_template",
        ),
        ([USER, call_with("{}"), {"role": "tool", "content": "3"}], r"\[2\] \(role 'tool'\).*model\.tool_prompt"),
    ],
)
def test_template_error_names_message_role_and_rule(messages: list[Any], named: str) -> None:
    strict = template(STRICT)
    strict.tokenizer.name_or_path = "owner/strict"
    with pytest.raises(ConfigError, match=named) as refused:
        strict.render_text(messages)
    assert "owner/strict" in str(refused.value)


JSON = "{{ c.function.arguments | tojson }}"
PAIRS = "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}"
TURN = "[{{ m.role }}|{{ m.content }}]"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "Does a thing.", "parameters": {"b": {}}}}
]


def printing(turn: str, arguments: str = JSON, *, tools: str = "{{ tools }}", last: str = "") -> str:
    """Return a template that prints tools, and of each message a turn and the calls; `last` follows these."""
    calls = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}:ARGUMENTS>{% endfor %}"
    return tools + "{% for m in messages %}" + turn + calls.replace("ARGUMENTS", arguments) + last + "{% endfor %}"


def test_numbers_in_calls_may_have_any_size() -> None:
    values = "{{ c.function.arguments.n | tojson }} {{ c.function.arguments.n | round | int }}"
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"n": 1700000000}'}}],
    }
    assert "1700000000 1700000000" in text_of(printing(TURN, values), USER, call)


SHAPES = {
    # Content as parts, as SmolVLM, Idefics3 and LLaVA-NeXT have it; or that of users only.
    "parts": printing(
        "[{{ m.role }}|{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}]"
    ),
    "users' parts": printing("[{{ m.role }}|{{ m.content[0].text if m.role == 'user' else m.content + '' }}]"),
    # Calls of answers without content only, as DeepSeek R1's distilled models have it.
    "null": printing("{% if m.content is not none %}" + TURN + "{% else %}", last="{% endif %}"),
    "absent": printing("{% if m.content is defined %}" + TURN + "{% else %}", last="{% endif %}"),
    # Arguments that are concatenated (DeepSeek V3); only of mappings (Qwen3-Coder); strings as they are, and mappings
    # as the model writes them; as Python prints them.
    "strings": printing(TURN, "{{ '' + c.function.arguments }}"),
    "mapping": printing(TURN, "{% if c.function.arguments is mapping %}" + PAIRS + "{% endif %}"),
    "tags": printing(
        TURN, "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}" + PAIRS + "{% endif %}"
    ),
    "raw": printing(TURN, "{{ c.function.arguments }}"),
    # Tools without what is around the function; results under another role, and with a name.
    "bare tools": printing(
        TURN, tools="{% for t in tools or [] %}{{ t.name }} {{ t.description }} {{ t.parameters }}{% endfor %}"
    ),
    "named results": printing(
        "{% if m.role in ('system', 'user', 'assistant') or m.role == 'function' and m.name %}"
        + TURN
        + "{{ m.name }}{% endif %}"
    ),
}
CHAT = [
    SYSTEM,
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"b":  7}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "seven"},
]


@pytest.mark.parametrize("name", SHAPES)
def test_all_shapes_of_templates_render_all_content(name: str) -> None:
    chat = template(SHAPES[name])
    assert set(chat.shape.lost) <= {"text alongside tool calls"}
    text = chat.render_text(CHAT, TOOLS)
    place = 0
    for mark in ("f", "Does a thing", "be brief", "a b", "f", "b", "7", "seven"):
        place = text.find(mark, place)
        assert place >= 0, (mark, text)
    if name == "named results":
        assert text.endswith("[function|seven]f")


@pytest.mark.parametrize(
    ("name", "printed"), [("strings", '{"b":  7}'), ("raw", '{"b":  7}'), ("tags", "<b>7"), ("mapping", "<b>7")]
)
def test_arguments_stay_strings_if_rendered_verbatim(name: str, printed: str) -> None:
    assert f"<f:{printed}>" in text_of(SHAPES[name], *CHAT)
    assert f"<f:{printed.replace('  ', ' ')}>" in text_of(SHAPES[name], USER, call_with({"b": 7}))


@pytest.mark.parametrize("name", ["mapping", "tags"])
def test_missing_arguments_are_an_empty_object(name: str) -> None:
    assert "<f:>" in text_of(SHAPES[name], USER, call_with(""))


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', None])
def test_rejected_non_object_arguments_are_reported(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments=.*JSON object"):
        text_of(printing(TURN, PAIRS), USER, call_with(arguments))


@pytest.mark.parametrize(
    "calls",
    [
        "{% for c in m.tool_calls[:1] %}{{ c.function }}{% endfor %}",
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{{ m.tool_calls }}",
    ],
)
def test_further_calls_of_an_answer_are_reported_or_rejected(calls: str) -> None:
    chat = template("{% for m in messages %}{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %}{% endfor %}")
    one, two = (dict(call_with('{"b": 7}')) for _ in range(2))
    two["tool_calls"] = [*two["tool_calls"], {"id": "2", "function": {"name": "g", "arguments": "{}"}}]
    assert chat.lost([USER, one]) == ()
    assert "further tool calls of an answer" in chat.shape.lost
    if "raise" not in calls:
        assert chat.lost([USER, two]) == ("further tool calls of an answer",)


def test_call_takes_precedence_over_the_text_next_to_it() -> None:
    beside = {**call_with('{"b": 7}'), "content": "wait"}
    assert '<f:{"b": 7}>' in text_of(SHAPES["null"], USER, beside)


def test_content_omitted_by_a_template_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    chat = template("{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}")
    assert chat.lost([USER]) == ()
    assert chat.lost(CHAT, TOOLS) == chat.lost([{**SYSTEM, "role": "developer"}, *CHAT[1:]], TOOLS)
    assert chat.lost(CHAT, TOOLS) == ("system messages", "tools", "tool calls", "tool results")
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 4
    assert any("tools" in text and "model.tool_prompt=hermes" in text for text in warnings)
    assert all("model.chat_template=PATH" in text for text in warnings)


@pytest.mark.parametrize(("message", "role"), [(SYSTEM, "system"), ({**SYSTEM, "role": "developer"}, "developer")])
def test_message_that_a_template_omits_is_refused_with_template_and_role(message: Any, role: str) -> None:
    chat = template("{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}")
    chat.tokenizer.name_or_path = "models/phi"
    for messages, named in (([message, USER], role), (CHAT[1:], "tool")):
        with pytest.raises(ConfigError, match=rf"role '{named}'.*'models/phi'.*model\.chat_template=PATH"):
            chat.render(messages)


def test_only_a_later_system_message_may_be_lost() -> None:
    chat = template(printing("{% if loop.first or m.role != 'system' %}" + TURN + "{% endif %}"))
    assert chat.lost([SYSTEM, USER]) == ()
    assert chat.lost([SYSTEM, USER, SYSTEM]) == ("system messages after the first turn",)


def test_template_that_omits_user_text_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"prints no text of user messages.*model\.chat_template"):
        text_of("{% for m in messages %}[{{ m.role }}]{% endfor %}", USER)


def test_templates_are_probed_once() -> None:
    rendered = []
    tokenizer = template(PLAIN).tokenizer
    tokenizer.chat_template = PLAIN + "{# another #}"
    original = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **options: rendered.append(args) or original(*args, **options)
    assert ChatTemplate(tokenizer).shape == ChatTemplate(tokenizer).shape
    assert 0 < len(rendered) < 40
    before = len(rendered)
    assert ChatTemplate(tokenizer).shape
    assert len(rendered) == before


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"chat_template": ENDLESS}, "a request cannot replace the model's template"),
        ([1], r"chat_template_kwargs=\[1\]: use an object"),
        ("enable_thinking", "use an object"),
        (5, "use an object"),
    ],
)
def test_request_may_set_template_options_but_not_the_template(kwargs: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        template(PLAIN).render([{"role": "user", "content": "hi"}], template_kwargs=kwargs)


def test_tokenizer_without_template_error_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has no chat template: .*chat_template\.jinja"):
        template(None)


@pytest.mark.parametrize("tools", ["[]", [3], ["f"]])
def test_malformed_tools_are_reported(tools: Any) -> None:
    with pytest.raises(ConfigError, match="tools="):
        template(PLAIN).render([USER], tools)


def test_rejected_tools_are_reported() -> None:
    source = "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}" + PLAIN
    with pytest.raises(ConfigError, match=r"^tools=\[\{'name': 'f'"):
        text_of(source, USER, tools=[{"name": "f", "input_schema": {}}])


@pytest.mark.parametrize("more", [{}, {"type": "function"}])
@pytest.mark.parametrize("name", ["parts", "bare tools"])
def test_bare_function_is_a_tool(name: str, more: dict[str, str]) -> None:
    alone = {**more, **TOOLS[0]["function"]}
    assert text_of(SHAPES[name], USER, tools=[alone]) == text_of(SHAPES[name], USER, tools=TOOLS)


def test_template_that_requires_short_call_ids_gets_them() -> None:
    strict = (
        "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- for c in m.tool_calls or [] -%}"
        "{%- if c.id | length != 9 -%}{{ raise_exception('Tool call IDs should have length 9!') }}{%- endif -%}"
        "({{ c.id }} {{ c.function.name }} {{ c.function.arguments }}){%- endfor -%}"
        "{{ m.tool_call_id or '' }}{%- endfor -%}"
    )
    call_id = "call_0123456789abcdef0123456789abcdef"
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = template(strict).render_text([USER, answer, {"role": "tool", "tool_call_id": call_id, "content": "r"}])
    short = text.partition("(")[2].partition(" ")[0]
    assert len(short) == 9
    assert text.count(short) == 2  # the call and its result have the same id


@pytest.mark.parametrize(
    ("end", "request_", "token"),
    [
        ("<|eot|>\n", "<|user|>", "<|eot|>"),
        ("<|eom|><|eot|>", "<|user|>", "<|eot|>"),  # Cohere's: an end of the text, and of the turn
        ("<|eom|><|eot|><|user|>", "<|user|>", "<|eot|>"),  # asks for an answer after every message
        ("<|eot|>a<|eom|>", "<|user|>", "<|eot|>"),  # Phi 3 closes a conversation, after a line break
        ("<|eot|>", "", "<|eot|>"),
        ("", "", None),
    ],
)
def test_end_token_of_an_answer_is_the_last_before_other_text(end: str, request_: str, token: str | None) -> None:
    tokenizer: Any = template("").tokenizer
    tokenizer.add_tokens(["<|eot|>", "<|eom|>", "<|user|>"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + end + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + request_ + "{% endif %}"
    )
    found = ChatTemplate(tokenizer).end_id
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == token


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ("<|user|>", "", True),
        ("", "<|user|>", True),
        ("user: ", "\n", False),
        ("", "{{ raise_exception('no') }}", True),
    ],
)
def test_answers_end_with_a_token_that_is_printed_after_them(before: str, after: str, ends: bool) -> None:
    """GLM's templates print none after an answer: its models end it with the token that begins the next turn."""
    tokenizer: Any = template("").tokenizer
    tokenizer.add_tokens(["<|user|>", "<|other|>"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + before
        + "{{ m.content }}<|other|>{% else %}{{ m.content }}"
        "" + after + "{% endif %}{% endfor %}"
    )
    assert ChatTemplate(tokenizer).ends_answers({tokenizer.convert_tokens_to_ids("<|user|>")}) == ends
