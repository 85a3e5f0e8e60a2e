"""Conversations that continue sampled tokens, through the templates of six families."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.continuation import Continuation
from rllm.types import Message

from .conftest import TEMPLATES

WORDS = st.sampled_from(["yes", "no", " a fig ", "42", "the user asks\n", "caf\u00e9 \u2192"])
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


@st.composite
def conversations(draw: Any) -> list[Message]:
    """Draw a question, then answers, of which some call a tool and get its result, and others are asked again."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": "Be kind."})
    messages.append({"role": "user", "content": draw(WORDS)})
    for number in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            arguments = json.dumps({"q": draw(WORDS), "n": 1.0}, indent=draw(st.sampled_from([None, 1])))
            call = {"id": f"call{number:05}", "type": "function"}
            function = {"name": "search", "arguments": arguments}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "search", "content": draw(WORDS)})
        else:
            messages.append({"role": "assistant", "content": draw(WORDS)})
            messages.append({"role": "user", "content": draw(WORDS)})
    return messages


def places_of_answers(messages: list[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


@cache
def continuation_of(parser: ChatTemplateParser) -> Continuation:
    """Return the continuation of a parser, which learns by a hundred renderings how its template prints turns."""
    return Continuation(parser.tokenizer, parser.template)


@pytest.mark.parametrize("family", TEMPLATES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=conversations(), garble=st.lists(st.integers(40, 200), min_size=1, max_size=6))
def test_conversation_is_one_append_only_sequence(
    parser_of: Callable[..., ChatTemplateParser], family: str, messages: list[Message], garble: list[int]
) -> None:
    """Sampled ids are kept in any tokenization, and the template's text follows them."""
    parser = parser_of(family)
    continuation = continuation_of(parser)
    first, *_ = places_of_answers(messages)
    ids, num_known = parser.template.render(messages[:first], TOOLS), 0
    for place in places_of_answers(messages):
        prompt = continuation.prompt_ids(ids, messages[:place], num_known, TOOLS) if num_known else ids
        assert prompt[: len(ids)] == ids
        end = end_of_turn(parser, messages, place)
        ids, num_known = [*prompt, *garble, *end], place + 1
    last = continuation.prompt_ids(ids, messages, num_known, TOOLS)
    text = parser.tokenizer.decode(last[len(ids) :])
    assert messages[-1]["content"].strip() in text
    assert text.endswith(parser.template.render_text(messages, TOOLS)[-8:]), (
        "the prompt ends with the header of an answer"
    )


def long_conversation(num_turns: int) -> list[Message]:
    """Return a conversation with three calls of a tool after each question."""
    messages: list[Message] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "A fig?"}]
    for number in range(num_turns):
        if number % 4 == 3:
            messages += [{"role": "assistant", "content": f"{number} figs."}, {"role": "user", "content": "And now?"}]
            continue
        call = {"id": f"call{number:05}", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "search", "content": str(number)})
    return messages


@pytest.mark.parametrize("family", TEMPLATES)
def test_long_conversation_continues_as_if_fully_rendered(
    parser_of: Callable[..., ChatTemplateParser], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = parser_of(family)
    messages = long_conversation(24)
    places = places_of_answers(messages)[3::5]

    def prompts() -> list[list[int]]:
        continuation = Continuation(parser.tokenizer, parser.template)
        return [continuation.prompt_ids([5, 6], messages[: place + 2], place + 1, TOOLS) for place in places]

    found = prompts()
    monkeypatch.setattr("rllm.parser.continuation.near_ends", lambda past: past)
    assert found == prompts()


def test_number_of_rendered_messages_per_turn_is_constant(
    parser_of: Callable[..., ChatTemplateParser], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser, sizes = parser_of("qwen"), []
    render = parser.template.render_marked

    def counting(messages: list[Message], *rest: Any) -> str:
        sizes.append(len(messages))
        return render(messages, *rest)

    monkeypatch.setattr(parser.template, "render_marked", counting)
    continuation = Continuation(parser.tokenizer, parser.template)
    messages = long_conversation(120)
    continuation.prompt_ids([5, 6], messages[:12], 11, TOOLS)
    largest = {}
    for num_turns in (20, 60, 100):
        sizes.clear()
        continuation.prompt_ids([5, 6], messages[: 2 * num_turns + 2], 2 * num_turns + 1, TOOLS)
        largest[num_turns] = max(sizes)
    assert len(set(largest.values())) == 1
    assert largest[100] < 10


COUNTING = (
    "{% for m in messages %}{{ m.role }}{% if m.role != 'assistant' %} {{ loop.index }}{% endif %}:"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_template_that_counts_messages_renders_all_of_them(
    parser_of: Callable[..., ChatTemplateParser],
) -> None:
    tokenizer = deepcopy(parser_of("qwen").tokenizer)
    tokenizer.chat_template = COUNTING
    continuation = Continuation(tokenizer, ChatTemplate(tokenizer))
    messages = long_conversation(30)
    ids = continuation.prompt_ids([5, 6], messages[:44], 43)
    assert "tool 44:" in tokenizer.decode(ids)


@pytest.mark.parametrize("family", TEMPLATES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=conversations())
def test_plain_answer_is_followed_by_append_only_text(
    parser_of: Callable[..., ChatTemplateParser], family: str, messages: list[Message]
) -> None:
    parser = parser_of(family)
    first = places_of_answers(messages)[0]
    prompt, ids, mask = parser.tokenize_and_mask(messages[: first + 1], TOOLS)
    known = [*prompt, *(token for token, sampled in zip(ids, mask, strict=True) if sampled)]
    asked = continuation_of(parser).prompt_ids(known, messages[: first + 2], first + 1, TOOLS)
    text = parser.parse(messages[: first + 2], True, True, TOOLS, accumulate_reasoning=True)
    assert parser.tokenizer.decode(asked) == text


@pytest.mark.parametrize("family", ["llama3", "mistral", "phi", "harmony"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=conversations())
def test_append_only_template_renders_the_same(
    parser_of: Callable[..., ChatTemplateParser], family: str, messages: list[Message]
) -> None:
    parser = parser_of(family)
    assume(parser.verify_equivalence(messages, TOOLS))
    last = places_of_answers(messages)[-1]
    prompt, ids, mask = parser.tokenize_and_mask(messages[: last + 1], TOOLS)
    known = [*prompt, *(token for token, sampled in zip(ids, mask, strict=True) if sampled)]
    asked = continuation_of(parser).prompt_ids(known, messages, last + 1, TOOLS)
    assert parser.tokenizer.decode(asked) == parser.template.render_text(messages, TOOLS)


@pytest.mark.parametrize("family", TEMPLATES)
def test_truncated_answer_is_closed(parser_of: Callable[..., ChatTemplateParser], family: str) -> None:
    parser = parser_of(family)
    continuation = continuation_of(parser)
    messages = [
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "42"},
    ]
    end = end_of_turn(parser, messages, 1)
    cut = continuation.prompt_ids([50, 51], messages, 2)
    whole = continuation.prompt_ids([50, 51, *end], messages, 2)
    assert cut == whole


GLM = """\
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{%- if messages[loop.index0 - 1].role != "tool" -%}{{ "<|tool|>" }}{%- endif -%}{{ "\n" + m.content }}
{%- else -%}{{ "<|" + m.role + "|>\n" + m.content }}
{%- for c in m.tool_calls or [] -%}{{ "\n<tool_call>" + c.function.name + "</tool_call>" }}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{{ "<|assistant|>\n" if add_generation_prompt }}"""
"""Like GLM 4's: nothing is rendered after an answer, so models end theirs with the beginning of the next turn."""


@pytest.mark.parametrize(
    ("expected", "end", "later"),
    [
        ({"content": "no"}, "<|user|>", {"role": "user", "content": "42"}),
        (
            {"content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            "<|tool|>",
            {"role": "tool", "tool_call_id": "call00000", "content": "7"},
        ),
    ],
)  # fmt: skip
def test_end_of_an_answer_may_begin_the_next_turn(
    parser_of: Callable[..., ChatTemplateParser], expected: Message, end: str, later: Message
) -> None:
    parser = parser_of(GLM)
    continuation = continuation_of(parser)
    messages = [{"role": "user", "content": "yes"}, {"role": "assistant", **expected}, later]
    as_printed = parser.template.render(messages)
    answer = parser.template.render(messages[:2], add_generation_prompt=False)
    for sampled in (answer, [*answer, *parser.tokenizer.encode(end)]):
        assert continuation.prompt_ids(sampled, messages, 2) == as_printed


def end_of_turn(parser: ChatTemplateParser, messages: list[Message], place: int) -> list[int]:
    """Return the special token with which the model ends an answer."""
    _, ids, mask = parser.tokenize_and_mask(messages[: place + 1], TOOLS)
    sampled = [token for token, is_sampled in zip(ids, mask, strict=True) if is_sampled]
    return sampled[-1:]


def test_text_added_by_the_agent_after_a_stop_string_follows_it(parser_of: Callable[..., ChatTemplateParser]) -> None:
    parser = parser_of("qwen")
    continuation = continuation_of(parser)
    encode = parser.tokenizer.encode
    known = encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nask()</code>")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "ask()</code>\nCalling tools"},
        {"role": "user", "content": "42"},
    ]
    ids = continuation.prompt_ids(known, messages, 2, appended_text="</code>\nCalling tools")
    assert ids[: len(known)] == known
    added = "\nCalling tools<|im_end|>\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    assert parser.tokenizer.decode(ids[len(known) :]) == added
    for other in (known + encode("<|im_end|>"), known + encode(" or not")):
        with pytest.raises(ConfigError, match="stop string can be extended"):
            continuation.prompt_ids(other, messages, 2, appended_text="</code>\nCalling tools")


TEXT_AFTER_RESULTS = (
    "{% for m in messages %}{% if m.tool_calls %}(call){% if loop.last %}{{ m.content }}{% endif %}"
    "{% elif m.role == 'tool' %}(result {{ m.content }}){{ messages[loop.index0 - 1].content }}"
    "{% else %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}[assistant]{% endif %}"
)
"""As Gemma 4's template prints an answer with text and calls."""


def test_results_follow_an_answer_rendered_after_them(tokenizer: Any) -> None:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = TEXT_AFTER_RESULTS
    call = {"id": "call00001", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    answer: Message = {"role": "assistant", "content": "I search.", "tool_calls": [call]}
    messages: list[Message] = [{"role": "user", "content": "figs?"}, answer, {"role": "tool", "content": "42"}]
    known = tokenizer.encode("[user]figs?<|im_end|>[assistant]I search.(call)", add_special_tokens=False)
    ids = Continuation(tokenizer, ChatTemplate(tokenizer)).prompt_ids(known, messages, 2)
    assert ids[: len(known)] == known
    assert tokenizer.decode(ids[len(known) :]) == "(result 42)"
