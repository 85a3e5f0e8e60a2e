from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.parser.answer import safe_length, visible
from rllm.parser.decoding import SplitText, split_reasoning
from rllm.parser.tool_parser import tool_parser


@pytest.mark.parametrize(
    ("text", "starts_open", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, SplitText("hm", "yes")),
        ("\n<think>hm</think>yes", False, SplitText("hm", "yes")),
        ("hm\n</think>\n\nyes", True, SplitText("hm", "yes")),
        ("<think>never closed", False, SplitText("never closed", "")),
        ("still open", True, SplitText("still open", "")),
        (" plain\n", False, SplitText("", " plain\n")),
        ("say <think> aloud</think>", False, SplitText("", "say <think> aloud</think>")),
        ("", False, SplitText("", "")),
    ],
)
def test_reasoning_is_streamed_separately(text: str, starts_open: bool, expected: SplitText) -> None:
    assert split_reasoning(text, starts_open=starts_open) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello", "Hello"),
        ("Hello\n", "Hello"),
        ("Hello\n<tool", "Hello"),
        ("Hello <too", "Hello "),
        ("Hello <b>", "Hello <b>"),
        ("Hello\n<tool_call>\n{}", "Hello"),
        ("a STO", "a "),
        ("<thi", ""),
        ("<this", "<this"),
        ("<think>\nso far", ""),
        ("<think>so</think>\n", ""),
        ("<think>so</think>\nyes", "yes"),
        ("  ", ""),
    ],
)
def test_ambiguous_text_is_held_back(text: str, shown: str) -> None:
    assert visible(text, tool_parser("hermes"), stop=["STOP"]).content == shown


def test_open_prompt_shows_nothing_before_the_reasoning_ends() -> None:
    assert visible("hm", starts_open=True).content == ""
    assert visible("hm</think>yes", starts_open=True).content == "yes"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("<thi", ""),
        ("<this", ""),
        ("<think>\n", ""),
        ("<think>\nso far", "so far"),
        ("<think>\nso far\n", "so far"),
        ("<think>\nso far</th", "so far"),
        ("<think>\nso far\n</think>\n\nyes", "so far"),
        ("<think>\nso STO", "so "),
        ("yes", ""),
    ],
)
def test_reasoning_is_shown_while_it_is_written(text: str, shown: str) -> None:
    assert visible(text, stop=["STOP"]).reasoning == shown


def test_open_prompt_begins_with_reasoning() -> None:
    assert visible("hm", starts_open=True).reasoning == "hm"
    assert visible("hm</think>yes", starts_open=True).reasoning == "hm"


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "<", "STOP", "ST", ' {"name": "a"}', "x", " "]


@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.booleans())
def test_shown_text_is_always_part_of_the_whole_answer(text: str, starts_open: bool) -> None:
    parser = tool_parser("hermes")
    stop = text.find("STOP")
    whole = text if stop < 0 else text[:stop]
    split = split_reasoning(whole, starts_open=starts_open)
    content = parser.parse(split.answer).content
    for length in range(len(text) + 1):
        shown = visible(text[:length], parser, stop=["STOP"], starts_open=starts_open)
        assert content.startswith(shown.content)
        assert split.reasoning.startswith(shown.reasoning)


def test_safe_length_without_markers_is_the_whole_text() -> None:
    assert safe_length("abc", []) == 3
