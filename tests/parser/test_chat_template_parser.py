from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser
from rllm.types import Message

ParserOf = Callable[..., ChatTemplateParser]

FAMILIES = ["qwen", "llama3", "mistral", "deepseek", "phi", "harmony"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

SYSTEM = {"role": "system", "content": "Be kind."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str = "") -> Message:
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


def calls(*arguments: str) -> Message:
    items = [
        {"id": f"call{place:05}", "type": "function", "function": {"name": "f", "arguments": text}}
        for place, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": items}


def tool(text: str, place: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{place:05}", "name": "f", "content": text}


THOUGHTFUL = [user("2+2?"), answer("4", "two, two"), user("Sure?"), answer("Yes", "check")]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "qwen",
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\ntwo, two\n</think>\n\n4<|im_end|>\n"
            "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\ncheck\n</think>\n\nYes<|im_end|>\n",
        ),
        (
            "mistral",
            "<s>[INST]2+2?[/INST]<think>\ntwo, two\n</think>\n\n 4</s>"
            "[INST]Sure?[/INST]<think>\ncheck\n</think>\n\n Yes</s>",
        ),
        (
            "deepseek",
            "<bos><｜User｜>2+2?<｜Assistant｜><think>\ntwo, two\n</think>\n\n4<eos>"
            "<｜User｜>Sure?<｜Assistant｜><think>\ncheck\n</think>\n\nYes<eos>",
        ),
        (
            "phi",
            "<|user|>\n2+2?<|end|>\n<|assistant|>\n<think>\ntwo, two\n</think>\n\n4<|end|>\n"
            "<|user|>\nSure?<|end|>\n<|assistant|>\n<think>\ncheck\n</think>\n\nYes<|end|>\n",
        ),
        (
            "harmony",
            "<|start|>system<|message|>You think first.<|end|><|start|>user<|message|>2+2?<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>two, two<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4<|return|>"
            "<|start|>user<|message|>Sure?<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>check<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        ),
    ],
)
def test_every_answer_is_rendered_as_the_model_wrote_it(parser_of: ParserOf, family: str, text: str) -> None:
    assert parser_of(family).parse(THOUGHTFUL, is_first_msg=True, accumulate_reasoning=True) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_history_without_reasoning_is_rendered_by_the_template(parser_of: ParserOf, family: str) -> None:
    parser = parser_of(family)
    text = parser.parse(THOUGHTFUL[:3], add_generation_prompt=True, is_first_msg=True)
    assert text == parser.template.render_text(THOUGHTFUL[:3])
    assert "two, two" not in text


def test_system_prompt_is_rendered_with_the_first_user_message(parser_of: ParserOf) -> None:
    chat = [SYSTEM, user("Hi"), answer("Hello"), user("Bye")]
    parser = parser_of("mistral")
    assert [parser.parse(chat[:end]) for end in (1, 2, 3)] == [
        "<s>",
        "<s>[INST]Be kind.\n\nHi[/INST]",
        "<s>[INST]Be kind.\n\nHi[/INST] Hello</s>",
    ]
    assert parser.parse(chat).endswith("Hello</s>[INST]Be kind.\n\nBye[/INST]")
    assert parser.verify_equivalence(chat[:2])
    assert not parser.verify_equivalence(chat)  # the template has moved the system prompt


def test_turn_of_several_results_is_closed_by_the_next(parser_of: ParserOf) -> None:
    parser, chat = parser_of("qwen"), [user("Go"), calls("{}", "{}"), tool("one"), tool("two", 1)]
    first = "<|im_start|>user\n<tool_response>\none\n</tool_response>"
    both = first + "\n<tool_response>\ntwo\n</tool_response>"
    assert parser.parse(chat[:3]).endswith(first)
    assert parser.parse(chat).endswith(both)
    assert parser.parse(chat, add_generation_prompt=True).endswith(both + "<|im_end|>\n<|im_start|>assistant\n")


def test_only_the_last_turn_is_left_open(parser_of: ParserOf) -> None:
    parser, same = parser_of("qwen"), tool("one")
    text = parser.parse([user("Go"), calls("{}"), same, calls("{}"), same])
    assert text.count("</tool_response><|im_end|>") == 1


def test_messages_may_be_rendered_one_by_one(parser_of: ParserOf) -> None:
    for family in FAMILIES:
        parser = parser_of(family)
        pieces = [parser.parse([message], is_first_msg=place == 0) for place, message in enumerate(THOUGHTFUL)]
        assert "".join(pieces) == parser.parse(THOUGHTFUL, is_first_msg=True)
    assert parser_of("llama3").parse([tool("1")]) == "<|start_header_id|>ipython<|end_header_id|>\n\n1<|eot_id|>"


def test_thinking_can_be_disabled(parser_of: ParserOf) -> None:
    parser = parser_of("qwen", disable_thinking=True)
    request = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parser.parse([user("Hi")], add_generation_prompt=True, is_first_msg=True) == request
    prompt, response, mask = parser.tokenize_and_mask([user("Hi"), answer("Hello", "never thought")])
    assert parser.tokenizer.decode(prompt) == request
    assert parser.tokenizer.decode(response) == "Hello<|im_end|>\n"
    assert mask == [1] * (len(response) - 1) + [0]


@pytest.mark.parametrize("family", ["qwen", "llama3", "deepseek"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_tags_in_the_content_are_parsed_as_reasoning(parser_of: ParserOf, family: str, accumulate: bool) -> None:
    tagged = [
        *(user("2+2?"), answer("<think>\ntwo, two\n</think>\n\n4")),
        *(user("Sure?"), answer("<think>\ncheck\n</think>\n\nYes")),
    ]
    texts = [
        parser_of(family).parse(chat, is_first_msg=True, accumulate_reasoning=accumulate)
        for chat in (tagged, THOUGHTFUL)
    ]
    assert texts[0] == texts[1]


def test_equivalence_check_reports_rewritten_history(parser_of: ParserOf) -> None:
    qwen, harmony = parser_of("qwen"), parser_of("harmony")
    assert [qwen.verify_equivalence(THOUGHTFUL[:end]) for end in (1, 2, 3, 4)] == [True, True, False, False]
    assert qwen.verify_equivalence(THOUGHTFUL[:3], accumulate_reasoning=False)
    assert parser_of("phi").verify_equivalence([SYSTEM, user("Hi"), answer("Hello"), user("Bye"), answer("Bye")])
    assert not harmony.verify_equivalence([user("Hi"), answer("Hello"), user("Bye")])  # <|return|> became <|end|>
    assert parser_of("llama3").verify_equivalence([SYSTEM, user("Hi"), calls("{}"), tool("1"), answer("Hello")], TOOLS)


def parts_of(parser: ChatTemplateParser, messages: list[Message]) -> list[tuple[int, str]]:
    """Return the response of the cumulative masks, as texts."""
    _, ids, mask = parser.tokenize_and_mask_cumulative(messages)
    pairs = groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [(value, parser.tokenizer.decode([token for _, token in group])) for value, group in pairs]


NEMOTRON = """\
{%- for m in messages -%}
{%- if m.role == "assistant" -%}
{%- set thought = "\n" + m.reasoning_content + "\n" if m.reasoning_content and loop.last else "" -%}
{{ "<|im_start|>assistant\n<think>" + thought + "</think>" + m.content + "<|im_end|>\n" }}
{%- else -%}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}
{%- endif -%}
{%- endfor -%}
{{ "<|im_start|>assistant\n<think>\n" if add_generation_prompt }}"""
"""Like Nemotron 3's: the prompt opens <think>, and answers without reasoning have empty tags."""
GLM = """\
{%- for m in messages -%}
{{ "<|" + m.role + "|>\n" + m.content }}
{%- for c in m.tool_calls or [] -%}{{ "\n<tool_call>" + c.function.name + "</tool_call>" }}{%- endfor -%}
{%- endfor -%}
{{ "<|assistant|>\n" if add_generation_prompt }}"""
"""Like GLM 4's: the model ends an answer with the token that begins the next turn."""
GEMMA = """\
{%- for m in messages -%}
{{ "<|start|>" + m.role + "\n" }}
{%- if m.reasoning_content and m.tool_calls -%}{{ "<|channel|>thought\n" + m.reasoning_content + "<|message|>" }}{%- endif -%}
{{ m.content }}{%- for c in m.tool_calls or [] -%}{{ "<|call|>" + c.function.name }}{%- endfor -%}{{ "<|end|>\n" }}
{%- endfor -%}
{{ "<|start|>assistant\n" if add_generation_prompt }}"""
"""Like Gemma 4's: reasoning has its own markup, and is printed with calls only."""


def test_empty_tags_close_the_reasoning_opened_by_the_prompt(parser_of: ParserOf) -> None:
    parts = parts_of(parser_of(NEMOTRON), [user("2+2?"), answer("4"), user("Sure?"), answer("Yes", "check")])
    assert [text for learned, text in parts if learned] == ["</think>4<|im_end|>", "check\n</think>Yes<|im_end|>"]


def test_answer_without_end_token_is_trained_with_the_next_token(parser_of: ParserOf) -> None:
    parser = parser_of(GLM)
    chat = [user("2+2?"), {**calls("{}"), "content": "So"}, tool("4"), answer("4"), user("Sure?"), answer("Yes")]
    parts = parts_of(parser, chat)
    assert [text for learned, text in parts if learned] == [
        "So\n<tool_call>f</tool_call><|tool|>",
        "4<|user|>",
        "Yes<|user|>",
    ]
    prompt, ids, _ = parser.tokenize_and_mask_cumulative(chat)
    assert (
        parser.tokenizer.decode(prompt + ids)
        == parser.template.render_text(chat, add_generation_prompt=False) + "<|user|>"
    )
    for number, end in ((2, "<|tool|>"), (4, "<|user|>")):
        _, ids, mask = parser.tokenize_and_mask(chat[:number])
        assert parser.tokenizer.decode(ids[-1:]) == end
        assert mask[-1] == 1


def test_template_without_end_of_answers_is_reported_once(
    parser_of: ParserOf, caplog: pytest.LogCaptureFixture
) -> None:
    parser = parser_of(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    for tokenized in (parser.tokenize_and_mask, parser.tokenize_and_mask_cumulative):
        tokenized([user("2+2?"), answer("4")])
    assert [record.getMessage().count("'4'") for record in caplog.records] == [1]


def test_omitted_reasoning_has_the_markup_of_the_template(parser_of: ParserOf) -> None:
    parts = parts_of(parser_of(GEMMA), [user("2+2?"), answer("4", "two, two")])
    assert [text for learned, text in parts if learned] == ["<|channel|>thought\ntwo, two<|message|>4<|end|>"]


def test_masks_mark_tokens_written_by_the_model(parser_of: ParserOf) -> None:
    assert parts_of(parser_of("qwen"), THOUGHTFUL) == [
        (1, "<think>\ntwo, two\n</think>\n\n4<|im_end|>"),
        (0, "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
        (1, "<think>\ncheck\n</think>\n\nYes<|im_end|>"),
        (0, "\n"),
    ]
    assert parts_of(parser_of("deepseek"), [user("Go"), calls('{"x":  1}'), tool("one"), answer("Done", "so")]) == [
        (
            1,
            "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"x":  1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><eos>',
        ),
        (0, "<｜tool▁outputs▁begin｜>one\n<｜tool▁outputs▁end｜>"),
        (1, "<think>\nso\n</think>\n\nDone<eos>"),
    ]


def test_prompt_of_a_single_answer_equals_that_of_the_engine(parser_of: ParserOf) -> None:
    for family in FAMILIES:
        parser = parser_of(family)
        prompt, response, mask = parser.tokenize_and_mask(THOUGHTFUL)
        assert prompt == parser.template.render(THOUGHTFUL[:-1])
        (_, last) = [part for part in parts_of(parser, THOUGHTFUL) if part[0]][-1]
        assert parser.tokenizer.decode([token for token, kept in zip(response, mask, strict=True) if kept]) == last


ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "</s>", "<eos>", "<|end|>", "<|return|>", "<|call|>")
WORDS = st.text(alphabet="ab é<>{}\"'\n,.", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Draw rounds of a user's message, perhaps tool calls, and an answer, perhaps with reasoning; cut off anywhere."""
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(WORDS)))
        for _ in range(draw(st.integers(0, 2))):
            arguments = draw(
                st.lists(st.sampled_from(["{}", '{"x":  1}', '{"y":[ 2.0, "}"]}']), min_size=1, max_size=3)
            )
            messages.append(calls(*arguments))
            messages += [tool(draw(WORDS), place) for place in range(len(arguments))]
        messages.append(answer(draw(WORDS), draw(st.one_of(st.just(""), WORDS))))
    return messages[: draw(st.integers(1, len(messages)))]


QUICK = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(messages=conversations(), accumulate=st.booleans(), with_tools=st.booleans())
def test_rendered_text_is_append_only(
    parser_of: ParserOf, family: str, messages: list[Message], accumulate: bool, with_tools: bool
) -> None:
    options: dict[str, Any] = {
        "is_first_msg": True,
        "accumulate_reasoning": accumulate,
        "tools": TOOLS if with_tools else None,
    }
    texts = [parser_of(family).parse(messages[:end], **options) for end in range(1, len(messages) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(messages=conversations())
def test_masked_in_tokens_decode_to_the_answers(parser_of: ParserOf, family: str, messages: list[Message]) -> None:
    parser = parser_of(family)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return
    prompt, response, mask = parser.tokenize_and_mask_cumulative(messages)
    whole = parser.parse(messages, is_first_msg=True, accumulate_reasoning=True)
    assert parser.tokenizer.decode(prompt + response).startswith(whole)
    starts = [place for place, kept in enumerate(mask) if kept and not (place and mask[place - 1])]
    assert len(starts) == len(answers)
    for start, message in zip(starts, answers, strict=True):
        ids = response[start : mask.index(0, start) if 0 in mask[start:] else None]
        assert parser.tokenizer.decode(ids[-1:]) in ENDS_OF_TURN
        read = parser.parse_completion(ids, prompt + response[:start])
        assert read["content"].strip() == (message["content"] or "")
        assert read["reasoning"] == message.get("reasoning_content", "")
        assert [call["function"] for call in read["tool_calls"]] == [
            call["function"] for call in message.get("tool_calls", [])
        ]


def test_answer_without_prompt_is_parsed_as_a_first_one(parser_of: ParserOf) -> None:
    parser = parser_of("deepseek")
    ids = parser.tokenizer.encode("hm\n</think>\n\nyes<eos>")
    assert parser.parse_completion(ids) == {"content": "yes", "reasoning": "hm", "tool_calls": []}


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}{% if add_generation_prompt %}>{% endif %}",  # drops reasoning
        "{% for m in messages | reverse %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    ],
)
def test_template_that_is_not_append_only_is_reported(parser_of: ParserOf, template: str) -> None:
    with pytest.raises(ConfigError, match="cannot be rendered append-only: train on the traces"):
        parser_of(template).parse([user("a"), answer("b"), user("c")], is_first_msg=True)


def test_answer_that_does_not_match_the_generation_prompt_is_reported(parser_of: ParserOf) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ConfigError, match=r"prompt is '>', but it prints an answer as '\[b\]'"):
        parser_of(template).tokenize_and_mask([user("a"), answer("b")])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "send at least one message"),
        (["hi"], r"messages\[0\]='hi'"),
        ([user("a")], "no assistant's answer"),
        ([answer("a")], r"messages\[0\]\.role='assistant'"),
    ],
)
def test_conversations_without_trainable_tokens_are_rejected(
    parser_of: ParserOf, messages: list[Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parser_of("qwen").tokenize_and_mask_cumulative(messages)


def test_single_answer_must_be_last(parser_of: ParserOf) -> None:
    with pytest.raises(ConfigError, match=r"messages\[-1\] has role 'user'"):
        parser_of("qwen").tokenize_and_mask([user("a"), answer("b"), user("c")])


def test_images_are_rejected(parser_of: ParserOf) -> None:
    with pytest.raises(ConfigError, match="only text is read"):
        ChatTemplateParser.get_parser(parser_of("qwen").tokenizer, processor=object())
